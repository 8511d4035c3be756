"""Weight versions: manifests, who holds which, and transfers of which every byte is hash-checked (I8).

`manifest` describes a version, `directory` who holds it (references, never bytes), `transfer` is the pure core of a pull and
`pull` its driver; `source` serves. Must not know samples, leases or what a model computes. Read `manifest.py` first, then `transfer.py`.
"""
