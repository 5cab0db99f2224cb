"""The whole stack in one process, under a virtual clock.

Real are the router's `Exchange` and placement, the reference engine's scheduler with its block pool and
prefix cache, the connector's scheduler half, the handoff thread's driver and the handoff protocol. Simulated
are the model, the network and the clock. A slot of a pool holds a fingerprint of all tokens up to it and of
its group, and an answer's next token is a function of the fingerprints that its attention reads. So a wrong
block is seen when it is read, and gives a wrong token.

`network` has the clock, links and endpoints; `node` a node; `client` a request on its way through the router;
`schedules` draws, runs, checks and shrinks schedules; `bugs` has the bugs that the tests plant.
"""
