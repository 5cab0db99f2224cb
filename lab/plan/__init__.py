"""`kvferry plan`: how many nodes a load needs, and how to use them.

`measuring` asks one node, or two, what their work costs; `costs` is the file in which that is kept. `loads`
reads traces. `simulation` is a fleet in virtual time, in which the router's own `Fleet` chooses the nodes,
and `search` looks for the least number of nodes that keeps the user's limits.
"""
