"""Move bytes between two processes in several ways, and compare them.

A *contender* is such a way: a transport of kvferry with options (a *path*), or another program. Its *owner*
serves a pool, and its *reader* reads from it. `kvferry doctor` and `kvferry bench` measure paths, also
between two hosts; `lab/bench` compares all contenders. Nothing here needs more than kvferry itself, except
the contenders that are other programs.
"""
