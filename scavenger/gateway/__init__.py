"""The gateway: the run's engines as one HTTP endpoint, on which each call of an agent is a turn in the ledger.

    agent --HTTP--> app.py --parse--> dialects.py --TurnRequest--> link.py --OpenTurn--> daemon (router/core/turns.py)
                      ^                 prompts.py: template, tokens         <--TurnTokens, durable ones only--
                      +---- reply or server-sent events, made by dialects.py

Owns HTTP, the dialects and who may call; keeps no state that a restart would miss, but for which call of a client is in which episode. Must
not know a worker, a lease or a ledger: what a turn is and what becomes of it is the router's. `dialects`, `identity` and `series` are pure.
starlette and uvicorn are the extra `gateway`, and only `app.py` imports them. Read `app.py` first.
"""
