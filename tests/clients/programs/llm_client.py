"""The llm command line against the daemon: python llm_client.py URL KEY."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, KEY = sys.argv[1:]

MODELS = f"""
- model_id: skippy
  model_name: sim
  api_base: "{URL}/v1"
  api_key_name: skippy
"""


def llm(*arguments: str, home: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "llm"), *arguments]
    environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_MAX_RETRIES": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


with tempfile.TemporaryDirectory() as home:
    (Path(home) / "extra-openai-models.yaml").write_text(MODELS)
    assert "skippy" in llm("models", home=home).stdout
    for way in ([], ["--no-stream"]):
        done = llm("-m", "skippy", "--key", KEY, *way, "hi", home=home)
        assert done.stdout.strip() == "Hello there!", (done.stdout, done.stderr)
    used = llm("-m", "skippy", "--key", KEY, "-u", "hi", home=home)
    assert "13 output" in used.stderr, used.stderr
    failed = llm("-m", "skippy", "--key", "wrong", "hi", home=home)
    assert failed.returncode != 0
    assert "API key" in failed.stderr, failed.stderr
