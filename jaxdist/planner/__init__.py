"""The planner: proves that a run fits on absent hardware, and predicts its speed,
before it is paid for.
"""
