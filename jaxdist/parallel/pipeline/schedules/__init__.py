"""Pipeline schedules as data (numpy only): made, read, checked, compiled, simulated and
drawn.
"""
