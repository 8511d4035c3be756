"""Grouped speculation: the samples of a prompt are each other's drafts (Seer, arXiv 2511.14617, section 3.4).

`automaton` holds what a group's samples said, `groups` which group a sample is of and how much is kept, `length` how much of a draft a pass
verifies, `speculator` puts them together for an engine. All pure: no model, no clock, no torch. A draft is a guess that the engine
verifies, so nothing here can change a token. Read `speculator.py` first.
"""
