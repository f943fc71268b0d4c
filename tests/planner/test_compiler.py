"""The child process that compiles for a plan, as its parent watches it."""

import stat

from jaxdist.planner import compiler

# The compiler's process: it tells its stage, is silent, and ends with a result.
SILENT = """#!/bin/sh
echo -n "compiling for v5p" > "$3/stage"
sleep 1.5
echo '{"entry": "x"}' > "$3/result.json"
"""


def test_a_stage_that_takes_long_is_told_again_with_the_seconds(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(SILENT)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(compiler.sys, "executable", str(program))
    monkeypatch.setattr(compiler, "SAY_EVERY_S", 0.2)
    said = []
    options = compiler.CompileOptions()
    result = compiler._watch(tmp_path, {"PATH": "/bin:/usr/bin"}, options, said.append)
    assert result["entry"] == "x"
    stages = [line for line in said if not line.startswith("starting the compiler")]
    assert stages[0] == "compiling for v5p"
    assert len(stages) > 1
    for line in stages[1:]:
        assert line.startswith("compiling for v5p, ")
        assert line.endswith(" s so far")
