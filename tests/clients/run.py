"""`make test-clients`: published clients, unmodified, against `tokenmill serve demo`.

    python tests/clients/run.py [NAME ...]

Each client lives in an environment of its own under out/clients/ (made at the first run), so that two versions of one
package can be tried. The server is started here, with keys, on a free port, and ended.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "out" / "clients"
KEY = "test-clients-key"
START_S = 120.0


@dataclass(frozen=True)
class Client:
    """A package (and what it leaves to its users to install) in an environment, and the script that uses it."""

    requirement: str
    script: str
    node: bool = False


CLIENTS = {
    "openai-2": Client("openai>=2,<3", "openai_python.py"),
    "openai-3": Client("openai>=3,<4", "openai_python.py"),
    "openai-2-tools": Client("openai>=2,<3", "openai_tools.py"),
    "openai-3-tools": Client("openai>=3,<4", "openai_tools.py"),
    "openai-node": Client("openai", "openai_node.mjs", node=True),
    "openai-3-responses": Client("openai>=3,<4", "openai_responses.py"),
    "openai-3-kept": Client("openai[realtime]>=3,<4", "openai_kept.py"),
    "langchain-openai": Client("langchain-openai", "langchain_openai_client.py"),
    "llama-index": Client("llama-index-llms-openai-like", "llama_index_client.py"),
    "anthropic": Client("anthropic", "anthropic_python.py"),
    "ollama": Client("ollama", "ollama_python.py"),
    "ollama-node": Client("ollama", "ollama_node.mjs", node=True),
    "text-generation": Client("text-generation", "text_generation_client.py"),
    "litellm": Client("litellm", "litellm_client.py"),
    "huggingface-hub": Client("huggingface_hub numpy", "huggingface_client.py"),
}


def main() -> int:
    names = sys.argv[1:] or list(CLIENTS)
    commands = {name: prepare(name, CLIENTS[name]) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        server = start(log, Path(folder))
        failed = []
        try:
            url = wait_for_url(server, log)
            for name, command in commands.items():
                if command is None:
                    print(f"SKIP {name}: npm is not here", flush=True)
                    continue
                began = time.monotonic()
                done = subprocess.run([*command, f"{url}/v1", KEY], cwd=HERE, check=False)
                print(f"{'FAIL' if done.returncode else 'PASS'} {name} ({time.monotonic() - began:.1f} s)", flush=True)
                failed += [name] if done.returncode else []
            if server.poll() is not None:
                failed.append("the server ended")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
        if failed:
            print(log.read_text()[-4000:])
            print("failed:", ", ".join(failed))
    return bool(failed)


def prepare(name: str, client: Client) -> list[str] | None:
    """Make the client's environment if it is not there; -> the command that runs its script."""
    folder = FOLDER / name
    stamp = folder / ".installed"
    if client.node and shutil.which("npm") is None:
        return None
    if not stamp.exists() or stamp.read_text() != client.requirement:
        print(f"== {name}: install {client.requirement}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        if client.node:
            subprocess.run(["npm", "install", "--silent", "--no-audit", client.requirement], cwd=folder, check=True)
        else:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            pip = [str(folder / "bin" / "pip"), "--disable-pip-version-check", "install", "-qq"]
            subprocess.run([*pip, *client.requirement.split()], check=True)
        stamp.write_text(client.requirement)
    if not client.node:
        return [str(folder / "bin" / "python"), client.script]
    shutil.copy(HERE / client.script, folder / client.script)  # Node looks for packages beside the script
    return ["node", str(folder / client.script)]


def start(log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """The server as a person would start it; clients may change which models there are."""
    (folder / "models").mkdir()
    shutil.copytree(ROOT / "src" / "tokenmill" / "demo" / "main", folder / "models" / "weights")
    code = "from tokenmill.cli.main import main; main()"
    flags = ["--port", "0", "--api-key", KEY, "--enable-per-request-metrics", "--scheduling-policy", "priority"]
    flags += ["--log-level", "warning"]
    flags += ["--allow-model-changes", "--model-folder", str(folder / "models")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TOKENMILL_HOME": str(folder / "home")}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", code, "serve", "demo", *flags], stdout=out, stderr=subprocess.STDOUT, env=environment
        )


def wait_for_url(server: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        found = re.search(r"listening on (http://\S+)/v1", log.read_text())
        if found:
            return found[1]
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


if __name__ == "__main__":
    raise SystemExit(main())
