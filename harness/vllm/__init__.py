"""The vLLM plugin: DeepSeek-V4 on our kernels, by entry points alone; see docs/vllm.md."""
