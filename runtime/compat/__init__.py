"""Tables of the settings of vLLM and TensorRT-LLM, and the function that reads them."""
