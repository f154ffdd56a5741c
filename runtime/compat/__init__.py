"""The words of vLLM and TensorRT-LLM: their configurations and flags, read into ours."""
