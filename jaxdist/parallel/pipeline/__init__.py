"""Pipeline parallelism: stages, the executor, and schedules."""
