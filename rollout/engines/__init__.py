"""The engines: token ids in, token ids and logprobs out. `base` is the interface, `reference` torch and transformers, `vllm` vLLM.

Own sampling and logprobs. Must not know leases, the daemon or the ledger. Read `base.py` first.
"""
