"""The vLLM plugin: DeepSeek-V4 on our kernels, by entry points alone; docs/vllm.md."""
