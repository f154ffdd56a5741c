"""Settings from flags and files, with the keys of vLLM and TensorRT-LLM."""
