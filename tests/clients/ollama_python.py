"""ollama against a running server: python tests/clients/ollama_python.py URL KEY. Run by tests/clients/run.py."""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
import tempfile

import ollama

url, headers = sys.argv[1].removesuffix("/v1"), {"Authorization": f"Bearer {sys.argv[2]}"}
client = ollama.Client(url, headers=headers)
COLD = {"temperature": 0, "num_predict": 60}
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def get_weather(city: str) -> str:
    """Get the weather

    Args:
      city: the city
    """
    return f"22 degrees and sunny in {city}"


assert client.list().models[0].model == "demo:latest" == client.ps().models[0].model
assert {"completion", "tools"} <= set(client.show("demo").capabilities)
whole = client.chat("demo", PARIS, options=COLD)
assert "Paris" in whole.message.content and whole.done and whole.done_reason == "stop" and whole.eval_count
parts = list(client.chat("demo", PARIS, stream=True, options=COLD))
assert "".join(p.message.content for p in parts) == whole.message.content and parts[-1].eval_count == whole.eval_count
generated = client.generate("demo", PARIS[0]["content"], options=COLD)
assert generated.response == whole.message.content and generated.prompt_eval_count == whole.prompt_eval_count
raw = "".join(
    p.response for p in client.generate("demo", "The capital of France is", raw=True, stream=True, options=COLD)
)
assert raw.strip().startswith("Paris")
assert client.generate("demo", "Hello", system="Be brief.", options=COLD).response

ask = [{"role": "user", "content": "What's the weather in Paris?"}]
called = client.chat("demo", ask, tools=[get_weather], options=COLD).message
assert called.tool_calls[0].function.name == "get_weather" and called.tool_calls[0].function.arguments == {
    "city": "Paris"
}
streamed = [p.message.tool_calls for p in client.chat("demo", ask, tools=[get_weather], stream=True, options=COLD)]
assert [c[0].function.arguments for c in streamed if c] == [{"city": "Paris"}]
told = client.chat(
    "demo", [*ask, called, {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")}],
    tools=[get_weather], options=COLD,
)  # fmt: skip
assert "22" in told.message.content

schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
tom = [{"role": "user", "content": "Extract name and age as JSON: Tom is 31."}]
assert json.loads(client.chat("demo", tom, format=schema, options=COLD).message.content) == {"name": "Tom", "age": 31}
assert isinstance(json.loads(client.chat("demo", tom, format="json", options=COLD).message.content), dict)
vectors = client.embed("demo", ["one", "two"]).embeddings
assert len(vectors) == 2 and list(client.embeddings("demo", "one").embedding) == list(vectors[0])
for wrong in (lambda: client.chat("nope", PARIS), lambda: client.pull("x"),
              lambda: client.generate("demo", "x", options={"tfs_z": 0.5})):  # fmt: skip
    try:
        wrong()
    except ollama.ResponseError as error:
        assert error.status_code in (400, 404, 501) and error.error
    else:
        raise AssertionError("a bad request was taken")


async def together() -> None:
    other = ollama.AsyncClient(url, headers=headers)
    found = await asyncio.gather(*[other.chat("demo", PARIS, options=COLD) for _ in range(8)])
    assert {m.message.content for m in found} == {whole.message.content}


asyncio.run(together())

# Models that are pulled from a folder of the server, made, shown, used, copied and deleted.
steps = list(client.pull("weights", stream=True))
assert steps[-1].status == "success" and client.pull("weights").status == "success"
made = client.create(
    "brief", from_="weights", system="Answer briefly.", parameters={"temperature": 0, "num_predict": 20}
)
assert made.status == "success"
assert {"demo:latest", "weights:latest", "brief:latest"} <= {each.model for each in client.list().models}
assert "SYSTEM Answer briefly." in client.show("brief").modelfile and "num_predict" in client.show("brief").parameters
spoken = client.chat("brief", PARIS, keep_alive="10m")
assert "Paris" in spoken.message.content and spoken.eval_count <= 20
assert (
    spoken.prompt_eval_count
    == client.chat(
        "weights", [{"role": "system", "content": "Answer briefly."}, *PARIS], options=COLD, keep_alive=0
    ).prompt_eval_count
)
held = {each.model: each for each in client.ps().models}
assert held["brief:latest"].expires_at.year < 2900 < held["demo:latest"].expires_at.year
assert client.generate("brief", keep_alive=0).done
assert client.copy("brief", "team/brief:v1").status == "success"
assert client.chat("team/brief:v1", PARIS).message.content == spoken.message.content
with tempfile.TemporaryDirectory() as folder:
    files = {}
    for name, text in {"config.json": "{}", "model.safetensors": "no weights"}.items():
        (pathlib.Path(folder) / name).write_text(text)
        files[name] = client.create_blob(pathlib.Path(folder) / name)
assert client.create("sent", files=files).status == "success"
for name in ("brief", "team/brief:v1", "sent", "weights"):
    assert client.delete(name).status == "success"
assert {each.model for each in client.list().models} == {"demo:latest"}
for wrong in (lambda: client.delete("brief"), lambda: client.copy("brief", "x"), lambda: client.chat("brief", PARIS),
              lambda: client.create("x", from_="../weights"), lambda: client.push("demo")):  # fmt: skip
    try:
        wrong()
    except ollama.ResponseError as error:
        assert error.status_code in (400, 404, 501) and error.error
    else:
        raise AssertionError("a bad request was taken")
