"""Pipeline schedules as tables: generators, files, checks, compiler and simulator."""
