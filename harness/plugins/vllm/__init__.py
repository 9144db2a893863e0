"""The vLLM plugin: DeepSeek-V4 on our kernels, by entry points alone; docs/vllm.md.

What stands in this folder needs no vLLM: options, the choice of kernels, what is told, the proof at
start, and the record of what of vLLM we rely on. `bound/` holds what derives from vLLM's classes.
"""
