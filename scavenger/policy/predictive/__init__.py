"""The policy that predicts: one forecast of the step, and every decision made from it. Pure.

Must not know the live core: it sees views and facts only.
`policy` implements the interface; `placement`, `migration` and `fleet` each own one decision; `view` is the run as forecasts see
it; `learned` what was learned of it. Read `policy.py` first.
"""
