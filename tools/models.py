"""docs/models.md from the table of families. Owns: its words; `--write` writes it, else it is compared.

`--foreign FILE` writes docs/models-elsewhere.md from what `TOKENMILL_FAMILIES=1 TOKENMILL_SWEEP=FOLDER pytest
tests/cpu/models/test_foreign.py` left in FOLDER/foreign.txt.

Run as `python tools/models.py`; the tests compare, too. Knows the tests only by their text: a family is tested if a
file of tests names it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tokenmill.checkpoint.gguf_meta import ARCHITECTURES
from tokenmill.models.config_fields import FIELDS
from tokenmill.models.family_of import SAME
from tokenmill.models.family_row import Shape
from tokenmill.models.foreign import MORE_PIECES, PIECES
from tokenmill.models.multimodal import OUTERS, TEXTS
from tokenmill.models.registry import file_of
from tokenmill.models.rules import everywhere
from tokenmill.models.table import TABLE
from tokenmill.models.table_older import last_biased

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
TESTS = ("family_cases.py", "*_families.py", "families_*.py", "*_llama.py", "llama_*.py")
"""Files of tests/cpu/models that name a case of a family."""
HEAD = """# Models

What `architectures` in a model's config.json may say. {count} architectures: {rows} are one row each of the table in
`models/table.py` and its neighbours, read by one builder (`models/family.py`); the others have a file of their own.

A known architecture with a config value that changes the computation and is not built is refused by the name of the
value. **Tested**: a tiny random model gives the logits of Transformers in float32 within 1e-4, whole, in chunks and in
company, and its greedy tokens through the whole engine (prefix hits, preemption). Every key of every config is deleted
and changed in tests: the model is then equal to Transformers' or refused.

Where `architectures` is missing or misspelt, `model_type` says the family; where Transformers computes a type with a
class of another one and writes that class's name (InternLM 3 says `LlamaForCausalLM`), the type counts, too. A folder
of layers without a head (`LlamaModel`, `Qwen3Model`: many embedding models) gives vectors, and refuses to write text.
Vectors have length one. They are pooled as the files say (`1_Pooling` of sentence-transformers, `pooling_type` of GGUF
files: the last token or the mean), without such files from the last token. A request may name the other way. Other
ways, and layers behind the pooling (`2_Dense`), are refused by name. Prompts that such folders suggest are for the
client to write.

On a CPU all of them decode from recordings (`tests/cpu/models/test_recorded.py`), but for mixtures whose experts are
not a multiple of 64 wide: torch computes these, call by call.

This page is written by `tools/models.py`. `docs/add-a-model.md` says how to add a row. Other families run through
Transformers, more slowly: [models-elsewhere.md](models-elsewhere.md) lists them.

| architecture | model type | built by | layers | tested | note |
|---|---|---|---|---|---|
"""
TEXT_HEAD = """
## Text parts of models that also see or hear

Such a checkpoint is served as it lies on the hub, text alone: `text_config` is the config of a family above, tensors
lose their prefix, those of the other parts are counted in one line and not loaded, and requests with pictures or sound
are refused. Positions of three parts (M-RoPE) are plain ones in text. `models/multimodal.py` lists what is known; each
is compared with Transformers as above. Any kind of text part that is known may stand in any of them. Where neither
config.json nor `text_config` says whether the head is the embedding, the tensors do.

| architecture | model type | text part, if the file names none |
|---|---|---|
"""
GGUF_HEAD = """
## GGUF files

What `general.architecture` may say, and the family that computes it. `llama` is Mistral or Mixtral, too, `mamba`
FalconMamba, `deepseek2` the second version where experts are chosen by a softmax. Where the format leaves a number out,
it is that of every published model of the family; what would have to be guessed is refused by the name of its key.
A file may have more rows of embeddings than tokens, as padded model folders do (llama.cpp refuses such a file), but not
fewer.

| architecture | computed as |
|---|---|
"""
OWN_FILES = {
    "Qwen3NextForCausalLM": "gated delta layers, gated attention, experts; its layers for drafts, too",
    "Qwen3_5ForCausalLM": "text only; gated delta layers and gated attention",
    "Qwen3_5MoeForCausalLM": "the same with experts",
    "KimiLinearForCausalLM": "a delta rule with a decay for each line of its matrices in most layers, latent attention "
    "without rotation in the others; shared and routed experts; Kimi Linear",
    "BailingHybridForCausalLM": "Kimi Linear's delta rule with decays that are bounded below, latent attention whose "
    "heads are gated, shared and routed experts; Ling 3.0 (`BailingMoeV3ForCausalLM`) whose experts have no limits",
    "Zamba2ForCausalLM": "Mamba-2 in every layer; attention and feed-forward layers that several layers share; not in "
    "pipeline stages",
    "MiniMaxForCausalLM": "lightning attention, which is a state space with fixed decays, in most layers; experts; "
    "also MiniMax Text 01 and M1 under the names of their files",
    "DeepseekV2ForCausalLM": "latent attention, shared and routed experts",
    "DeepseekV3ForCausalLM": "latent attention, shared and routed experts; also Kimi K2; its layers for drafts, too",
    "DeepseekV32ForCausalLM": "DeepSeek V3 with an index that chooses the keys that a token sees (on a CPU in plain "
    "torch); with --max-model-len up to `index_topk` a token sees all, as in DeepSeek V3",
    "GlmMoeDsaForCausalLM": "as DeepSeek V3.2, and layers may share a choice; GLM-5",
    "SarvamMLAForCausalLM": "latent attention, shared and routed experts; Sarvam 105B",
    "AXK1ForCausalLM": "DeepSeek V3 with a norm behind each mixture; A.X K1",
    "AXK2ForCausalLM": "DeepSeek V3.2 with gated norms, and gates of attention's columns made with queries; A.X K2",
    "HYV4ForCausalLM": "streams of hidden states (hyper-connections), GLM-5's attention with sinks and gates, clipped "
    "experts; Hy4; without its layers for drafts; not in pipeline stages",
    "LongcatFlashForCausalLM": "two latent attentions a layer, past which experts lead; some of these do nothing; "
    "without its layers for drafts",
    "MiniCPM3ForCausalLM": "latent attention, factors on embeddings, blocks and logits",
    "YoutuForCausalLM": "latent attention",
    "Mistral4ForCausalLM": "latent attention with queries scaled by their position, shared and routed experts; Mistral "
    "Small 4",
    "Glm4MoeLiteForCausalLM": "latent attention, shared and routed experts; GLM-4.7-Flash",
    "FalconForCausalLM": "three layouts of q/k/v, parallel blocks, rope or ALiBi (Transformers rounds it to bfloat16)",
    "FalconH1ForCausalLM": "Mamba-2 and attention side by side in every layer",
    "Gemma3nForCausalLM": "the text model: streams of hidden states, embeddings for each layer, shared keys and values",
    "GPT2LMHeadModel": "learned positions, matrices stored transposed",
    "OpenAIGPTLMHeadModel": "GPT-2 with norms behind its sums: the first GPT",
    "GptOssForCausalLM": "sinks, alternating windows, experts with biases and a clamped gate; also in MXFP4",
    "OPTForCausalLM": "learned positions; norms before or after the blocks",
    "Gemma4ForCausalLM": "the text model: heads of two sizes, shared keys and values, embeddings for each layer",
    "Llama4ForCausalLM": "the text model, within its first chunk of attention",
}


ELSEWHERE = ROOT / "docs" / "models-elsewhere.md"
ELSEWHERE_HEAD = """# Models through Transformers

A family that is not in [models.md](models.md) runs through Transformers where that has it (`--model-impl auto`, the
default; `transformers` asks for it, `tokenmill` for none of it). Transformers computes the layers, tokenmill schedules,
keeps keys and values in pages, finds prefixes and samples. It is slower: nothing is recorded, and products are
Transformers' own, so that on a CPU, too, the bytes of a row may depend on the rows beside it. Weights are neither
quantised nor split over devices. Python code that comes with a model is never run.

Every load is proven: a prompt of {pieces} tokens, computed in three pieces and as two sequences in one step, must say
what Transformers says alone. A model that fails this (it has states, masks or caches of its own) keeps Transformers'
caches, one for each sequence, if a prompt of {more} tokens in {cuts} pieces then says what it should. One that does
not go on from these either is computed anew from all tokens for each token, which becomes slow with their number. The
log tells which way is taken, why, and how much memory a token takes. In both ways sequences are computed one after the
other and share no prefixes; `n`, beams, drafts, chunks and preemption work. What fails all three is refused with the
reasons: an encoder, for instance, looks at what comes later.

Tiny random models of every causal type of Transformers {version}, {date}: {own} are built here, {equal} are equal
through Transformers (logits within 1e-4, in chunks and in company), {caches} of them with its own caches and {anew}
computed anew; {refused} are refused{untried}; none is wrong. ("Equal" is also said of types that are built here.)

| model type | built here | through Transformers |
|---|---|---|
"""


def elsewhere(said: str, version: str, date: str) -> str:
    """The page from a sweep's lines, `type: verdict` each."""
    own = {row.model_type for row in FIELDS.values()} | {outer.model_type for outer in OUTERS.values()} | SAME.keys()
    rows, counts = [], {"equal": 0, "refused": 0, "no": 0}
    for line in said.splitlines():
        kind, verdict = line.split(": ", 1)
        counts[verdict.split()[0].rstrip(":,")] += 1
        verdict = re.sub(r"^refused: .*? here: ", "refused: ", verdict)
        verdict = re.sub(r"^no tiny model.*", "not tried", verdict).rstrip(".:")
        here = "yes" if kind in own or f"{kind}_text" in own else ""
        rows.append(f"| `{kind}` | {here} | {verdict.replace('|', '/')} |\n")
    untried = f", {counts['no']} have no tiny config that the sweep can make" if counts["no"] else ""
    head = ELSEWHERE_HEAD.format(
        pieces=sum(PIECES), more=sum(MORE_PIECES), cuts=len(MORE_PIECES), version=version, date=date,
        own=sum("| yes |" in row for row in rows), equal=counts["equal"], caches=said.count(": equal, its own caches"),
        anew=said.count(": equal, computed anew"), refused=counts["refused"], untried=untried,
    )  # fmt: skip
    return head + "".join(rows)


def main() -> int:
    """Write the page, or say that it is not up to date."""
    if "--foreign" in sys.argv[1:]:
        import datetime

        import transformers

        said = Path(sys.argv[sys.argv.index("--foreign") + 1]).read_text(encoding="utf-8")
        ELSEWHERE.write_text(elsewhere(said, transformers.__version__, str(datetime.date.today())), encoding="utf-8")
        return 0
    text = page()
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") != text:
        print("docs/models.md is not up to date: python tools/models.py --write")
        return 1
    return 0


def page() -> str:
    """The whole page."""
    files = sorted({path for name in TESTS for path in (ROOT / "tests" / "cpu" / "models").glob(name)})
    tests = "".join(path.read_text(encoding="utf-8") for path in files)
    lines = [HEAD.format(count=len(FIELDS), rows=len(TABLE))]
    for name in sorted(FIELDS, key=str.lower):
        kind, row = FIELDS[name].model_type, TABLE.get(name)
        layers = describe(row.shape) if row else ""
        note = row.note if row else OWN_FILES[name]
        built = "a row" if row else f"`models/{file_of(name)}.py`"
        tested = "yes" if is_tested(kind, tests) else "no"
        lines.append(f"| `{name}` | `{kind}` | {built} | {layers} | {tested} | {note} |\n")
    lines.append(TEXT_HEAD)
    for name in sorted(OUTERS, key=str.lower):
        outer = OUTERS[name]
        lines.append(f"| `{name}` | `{outer.model_type}` | `{outer.text}`: `{TEXTS[outer.text].architecture}` |\n")
    kinds = ", ".join(f"`{kind}`" for kind in sorted(TEXTS))
    lines.append(f"\nKinds of text parts: {kinds}.\n")
    lines.append(GGUF_HEAD)
    lines += [f"| `{name}` | `{ARCHITECTURES[name]}` |\n" for name in sorted(ARCHITECTURES)]
    return "".join(lines)


def is_tested(kind: str, tests: str) -> bool:
    """Does a file of tests name a case of this family?"""
    names = {kind, kind.removesuffix("_text"), kind.removesuffix("_text").replace("_", "-")}
    return any(re.search(rf'"{re.escape(name)}[-"]', tests) for name in names)


def describe(shape: Shape) -> str:
    """What differs from Llama's layers, in a few words."""
    attend, norms, mix, said = shape.attend, shape.norms, shape.mix, []
    if norms.kind != "rms":
        said.append(
            {
                "layer": "layer norms",
                "scale": "layer norms without bias",
                "bare": "norms without weights",
                "bare_rms": "norms without weights",
            }[norms.kind]
        )
    if norms.after:
        said.append("norms around blocks" if norms.before else "norms after blocks")
    if shape.parallel:
        said.append("parallel blocks" + (" if the config says so" if isinstance(shape.parallel, str) else ""))
    if attend.norms is not None:
        over = {"head": "heads", "row": "rows of heads", "own": "each head by itself"}[attend.norms.over]
        said.append(f"q/k norms of {over}" + (" after rope" if attend.norms.rotated else ""))
    if attend.layer is not everywhere:
        said.append("windows or layers without rope")
    said += _positions(shape)
    if not shape.feed.gated and mix is None:
        said.append("plain feed-forward layer")
    mixes = shape.mixer is not None and shape.mixer is not last_biased
    if mixes or shape.single is not None:
        said.append("layers with states" if mixes else "one block a layer, with states")
    if shape.residual:
        said.append("multipliers")
    if mix is not None:
        said.append(
            "experts"
            + (" and shared ones" if mix.shared else "")
            + (", sigmoid scores" if "sigmoid" in mix.route.order else "")
        )
    return ", ".join(said) or "Llama's"


def _positions(shape: Shape) -> list[str]:
    attend, outside = shape.attend, shape.outside
    if outside.positions is not None:
        return ["learned positions" if outside.positions.name else "sines for positions"]
    if attend.scores is not None and attend.scores.alibi:
        return ["ALiBi"]
    return ["neighbours rotate in pairs"] if attend.pairs else []


if __name__ == "__main__":
    sys.exit(main())
