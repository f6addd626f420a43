"""What the benchmarks share.

machine.py  which machine this is, and its memory bandwidth in this minute
report.py   rows {name, ours, peer, ratio, unit, target, ok}, as a table and as JSON
options.py  the command line that every benchmark has
roof.py     the fastest that a decode step can be
metrics.py  what a pool's processes say of themselves
pool.py     a pool of real processes, and closed batches of requests through it
waves.py    strategies side by side: workloads with all their admission waves
delayed.py  a decode node whose messages between nodes arrive late
figures.py  plots in the form of the paper's, of what waves.py measured
panels.py   how plots look
peers.py    other engines, found and driven, never needed
"""
