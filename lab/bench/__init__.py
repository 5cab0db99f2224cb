"""Programs that compare kvferry with other programs: `python -m kvferry.lab.bench.transports` and its
neighbours.
"""
