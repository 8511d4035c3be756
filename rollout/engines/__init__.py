"""The engines: token ids in, token ids and logprobs out. `base` is the interface, `reference` torch and transformers, `vllm` vLLM.

Read `base.py` first.
"""
