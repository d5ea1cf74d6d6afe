"""Writes docs/guide.md and its pictures, and draws the benchmark table of the README.

    python -m docs.guide

The prose is in template.md. Everything in double braces there is a value from the runs below, of the model in assets/,
on the CPU, in float32; everything in double brackets, `[[file:name]]`, becomes a link to the source and must exist
there. What the prose says in words of its own about a run is asserted beside the run. tests/test_docs.py makes the
files again and compares them with those that are committed.
"""

from collections.abc import Iterable, Iterator

import torch

from docs.guide.markdown import ROOT, code, fill, listing, ranges, read_table, short, table
from docs.guide.pictures import draw_chunks, draw_occupancy, draw_pool, draw_throughput, draw_timeline
from docs.guide.run import BLOCK, CLEAR, Run, Step
from nanovllm import SamplingParams
from nanovllm.engine.detokenizer import IncrementalDecoder, make_decode
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampler import exponential_noise

DOCS = ROOT / "docs"


def chat(question: str) -> str:
    """What the model's chat template makes of one question, without thinking."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


COMPANION, FOLLOWED = chat("What is 27 + 58?"), chat("Count from 3 to 9.")
FOX, OWL = chat("Tell me a story about a fox."), chat("Tell me a story about an owl.")


def follow() -> tuple[Run, dict[str, object]]:
    """Two requests from prompt to end; the second one is the one that the guide follows."""
    run = Run(num_kvcache_blocks=12, max_model_len=192)
    llm, config = run.llm, run.llm.config.model_config
    run.add(COMPANION, FOLLOWED)
    companion, followed = run.seqs
    queued = repr(followed)
    llm.step()
    prefill = run.steps[0]
    input_ids, positions, context = prefill.inputs
    k_cache = llm.model_runner.attention_layers[0].k_cache
    written = k_cache.flatten(0, 1).flatten(1).abs().sum(1).nonzero().flatten().tolist()
    assert written == sorted(context.slot_mapping.tolist())
    after_prefill = counters(followed)
    llm.step()
    decode = run.steps[1].inputs
    run.finish()
    text = run.text(followed)
    boundary = next(n for n, step in enumerate(run.steps) if not step.batch.is_prefill and step.batch.new_blocks)
    assert (boundary, run.steps[2].seq_ids, run.steps[3].seq_ids) == (13, [0, 1], [1])
    assert [x.num_prompt_tokens // BLOCK for x in run.seqs] == [1, 1] and prefill.tables[0] == [0, 1]
    assert config.num_hidden_layers == 4 and config.vocab_size == 1024
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    ((_, boundary_index, (boundary_block,)),) = run.steps[boundary].batch.new_blocks
    line = prefill.seq_ids.index(followed.seq_id)
    first_slot = context.slot_mapping[context.cu_seqlens_q[line]].item()
    row = prefill.batch.rows[line]
    probabilities, best = prefill.logits[line].softmax(0), prefill.logits[line].topk(5)
    kv_bytes = 4 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    names = {
        "model.embed_tokens": "ids to vectors",
        "model.layers.0.self_attn.qkv_proj": "(4 query + 2 key + 2 value heads) x 64",
        "model.layers.0.self_attn.attn": "4 heads x 64, after attention",
        "model.layers.0.self_attn.o_proj": "back to the hidden size",
        "model.layers.0.mlp.gate_up_proj": "gate and up, side by side",
        "model.layers.0.mlp.down_proj": "back to the hidden size",
        "lm_head": "two rows only: the last token of each request",
    }
    fields = ("rows", "starts", "counts", "samples", "new_rows", "new_blocks")
    batch = {name: getattr(prefill.batch, name) for name in fields}
    return run, {
        "prompt_repr": repr(FOLLOWED),
        "prompt_ids": short(followed.prompt_token_ids, 99),
        "num_prompt": followed.num_prompt_tokens,
        "num_companion": companion.num_prompt_tokens,
        "pieces": " ".join(run.piece(token_id) for token_id in followed.prompt_token_ids),
        "queued": queued,
        "num_blocks_needed": -(-followed.num_prompt_tokens // BLOCK),
        "block_table": prefill.tables[followed.seq_id],
        "batch": listing(**batch, token_ids=short(prefill.batch.token_ids, 6)),
        "row": row,
        "context": listing(
            input_ids=short(input_ids),
            positions=short(positions),
            slot_mapping=short(context.slot_mapping),
            cu_seqlens_q=context.cu_seqlens_q.tolist(),
            cu_seqlens_k=context.cu_seqlens_k.tolist(),
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=context.max_seqlen_k,
            logits_indices=context.logits_indices.tolist(),
            block_tables=context.block_tables,
        ),
        "slot_table": table(
            "position | id | token | block of the table | block id | offset | slot",
            (
                (p, followed[p], run.piece(followed[p]), p // BLOCK, prefill.tables[1][p // BLOCK], p % BLOCK, slot)
                for p, slot in enumerate(context.slot_mapping[context.cu_seqlens_q[line] :].tolist())
                if p in (0, 1, 2, 14, 15, 16, 17, 18, 19)
            ),
        ),
        "first_slot": first_slot,
        "num_tokens": len(input_ids),
        "cache_shape": list(llm.model_runner.kv_cache.shape),
        "kv_bytes": f"{kv_bytes:,}",
        "written": ranges(written),
        "shapes": table("part | output | what it is", ((code(n), run.shapes[n], what) for n, what in names.items())),
        "top5": table(
            "token | id | logit | probability",
            (
                (run.piece(i), i, f"{logit:.2f}", f"{probabilities[i]:.2f}")
                for i, logit in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            ),
        ),
        "first_id": prefill.ids[line],
        "first_piece": run.piece(prefill.ids[line]),
        "after_prefill": after_prefill,
        "decode_inputs": listing(
            input_ids=decode.input_ids.tolist(),
            positions=decode.positions.tolist(),
            slot_mapping=decode.slot_mapping.tolist(),
            context_lens=decode.context_lens.tolist(),
            block_tables=short(decode.block_tables, 6),
        ),
        "decode_slot": decode.slot_mapping[1].item(),
        "decode_position": decode.positions[1].item(),
        "decode_steps": decode_steps(run, (1, 2, 3, boundary - 1, boundary, boundary + 1, len(run.steps) - 1)),
        "boundary_step": boundary,
        "boundary_position": run.steps[boundary].batch.starts[0],
        "step_before": boundary - 1,
        "boundary_before": run.steps[boundary - 1].batch.starts[0],
        "boundary_new": run.steps[boundary].batch.new_blocks[0],
        "boundary_index": boundary_index,
        "boundary_block": boundary_block,
        "last_step": len(run.steps) - 1,
        "companion_end": max(n for n, step in enumerate(run.steps) if companion.seq_id in step.seq_ids),
        "finished": repr(followed),
        "completion": text,
        "end": counters(followed),
        "hashes": table(
            "block | its tokens | block before it | hash",
            (
                (i, f"{i * BLOCK} to {i * BLOCK + BLOCK - 1}", i - 1 if i else "none", code(f"{value:016x}"))
                for i, value in enumerate(followed.block_hashes)
            ),
        ),
        "free_after": list(llm.scheduler.block_manager.free_block_ids),
    }


def counters(seq: Sequence) -> str:
    names = ("num_computed_tokens", "num_scheduled_tokens", "num_tokens", "num_prompt_tokens")
    return listing(**{name: getattr(seq, name) for name in names}, status=seq.status.name)


def decode_steps(run: Run, numbers: Iterable[int]) -> str:
    """Lines of decode steps, one for each request in them, with a gap where steps are left out."""
    rows: list[tuple[object, ...]] = []
    previous = None
    for number in numbers:
        step = run.steps[number]
        if previous is not None and number != previous + 1:
            rows.append(("...",) * 8)
        previous = number
        inputs, ends = step.inputs, {seq_id: reason for seq_id, _, reason in step.outputs}
        for i, seq_id in enumerate(step.seq_ids):
            rows.append((
                number,
                seq_id,
                run.piece(inputs.input_ids[i].item()),
                inputs.positions[i].item(),
                step.tables[seq_id],
                inputs.slot_mapping[i].item(),
                inputs.context_lens[i].item(),
                run.piece(step.ids[i]) + (f", ends: {ends[seq_id]}" if ends.get(seq_id) else ""),
            ))  # fmt: skip
    return table("step | request | input | position | block table | slot | context | sampled", rows)


def share_prefix(run: Run) -> tuple[Step, dict[str, object]]:
    """Two more requests on the same engine, that begin with all of the followed one."""
    followed = run.seqs[1]
    answer = run.text(followed, with_special_tokens=True)
    prompt = FOLLOWED + answer + "\n" + chat("Spell garden.")
    number = len(run.steps)
    free = list(run.llm.scheduler.block_manager.free_block_ids)
    run.add(prompt, prompt)
    third, fourth = run.seqs[2:]
    assert third.prompt_token_ids[: len(followed)] == followed.token_ids
    run.llm.step()
    step = run.steps[number]
    _, positions, context = step.inputs
    both = set(step.tables[2]) & set(step.tables[3])
    identities = [run.llm.scheduler.block_manager.blocks[step.tables[i][2]].prefix_id for i in (2, 3)]
    assert identities[0] == identities[1]
    assert both == {2, 3} and step.tables[2] == [2, 3, 1, 4] and step.tables[3] == [2, 3, 5, 6]
    assert step.batch.starts == [32, 32]
    run.finish()
    return step, {
        "hit_prompt": repr(prompt),
        "hit_len": len(third.prompt_token_ids),
        "hit_free_before": free,
        "hit_cached": third.num_cached_tokens,
        "hit_shared": sorted(both),
        "hit_tables": listing(request_2=step.tables[2], request_3=step.tables[3]),
        "hit_computed": step.batch.counts[0],
        "hit_context": listing(
            starts=step.batch.starts,
            counts=step.batch.counts,
            positions=short(positions),
            slot_mapping=short(context.slot_mapping),
            cu_seqlens_q=context.cu_seqlens_q.tolist(),
            cu_seqlens_k=context.cu_seqlens_k.tolist(),
            block_tables=context.block_tables.tolist(),
        ),
        "hit_first_missed": step.tables[2][2],
        "hit_second_missed": step.tables[3][2],
        "hit_free_after": step.free,
        "hit_text": run.text(third),
    }


def draw_tokens(run: Run) -> dict[str, object]:
    """The noise behind a sampled token: one position, three seeds."""
    number = len(run.steps)
    prompt = "Once upon a time there was a brave"
    run.add(prompt, max_tokens=1)
    run.finish()
    logits = run.steps[number].logits
    position = run.seqs[-1].num_prompt_tokens
    seeds = (0, 1, 2, 3)
    noises = [exponential_noise(torch.tensor([s]), torch.tensor([position]), logits.shape[1])[0] for s in seeds]
    scores = [logits[0] - noise.log() for noise in noises]
    drawn = [score.argmax().item() for score in scores]
    for seed, score, token_id in zip(seeds, scores, drawn, strict=True):
        best = score.topk(2).values
        assert best[0] - best[1] > CLEAR
        params = SamplingParams(temperature=1, seed=seed, max_tokens=1)
        (output,) = run.llm.generate(prompt, params, use_tqdm=False)
        assert output["token_ids"] == [token_id]
    rows = [
        (
            run.piece(i),
            f"{logits[0, i]:.2f}",
            f"{logits[0].softmax(0)[i]:.2f}",
            *(
                f"**{score[i]:.2f}**" if i == winner else f"{score[i]:.2f}"
                for score, winner in zip(scores, drawn, strict=True)
            ),
        )
        for i in sorted({*logits[0].topk(4).indices.tolist(), *drawn}, key=lambda i: -logits[0, i])
    ]
    head = "token | logit | probability | " + " | ".join(f"seed {seed}" for seed in seeds)
    return {"noise_position": position, "noise_table": table(head, rows)}


def decode_text(run: Run) -> dict[str, object]:
    """A text of several bytes a character, token by token."""
    text = "fox 🦊!"
    decoder = IncrementalDecoder(make_decode(run.llm.tokenizer, skip_special_tokens=True))
    ids = run.llm.tokenizer(text)["input_ids"]
    rows = [(i, run.piece(i), code(repr(decoder.push(i)))) for i in ids]
    return {"emoji": code(text), "emoji_table": table("id | decoded alone | what `push` returns", rows)}


def chunk() -> tuple[Run, dict[str, object]]:
    """Three prompts that do not fit into one step."""
    budget = 24
    run = Run(num_kvcache_blocks=12, max_model_len=192, max_num_batched_tokens=budget)
    run.add(COMPANION, FOLLOWED, FOX, max_tokens=3)
    run.finish()
    rows = (
        (
            number,
            "prefill" if step.batch.is_prefill else "decode",
            ", ".join(
                f"{seq_id}: {start} to {start + count - 1}"
                for seq_id, start, count in zip(step.seq_ids, step.batch.starts, step.batch.counts, strict=True)
            ),
            step.batch.samples,
            step.waiting,
            step.running,
        )
        for number, step in enumerate(run.steps[:4])
    )
    assert [step.seq_ids for step in run.steps[:4]] == [[0, 1], [1, 2], [2], [0, 1, 2]]
    assert run.steps[0].batch.counts[1] == 2
    return run, {
        "budget": budget,
        "chunk_lengths": ", ".join(str(seq.num_prompt_tokens) for seq in run.seqs),
        "chunk_table": table("step | kind | request: positions | samples | waiting | running", rows),
    }


def preempt() -> tuple[Run, dict[str, object]]:
    """Two stories in a pool that holds one and a half."""
    pool = 5
    run = Run(num_kvcache_blocks=pool, max_model_len=pool * BLOCK)
    run.add(FOX, OWL, max_tokens=30)
    run.finish()
    ((number, victim),) = run.preemptions
    again = next(n for n, step in enumerate(run.steps) if n > number and victim in step.seq_ids)
    before, at, resumed = run.steps[number - 1], run.steps[number], run.steps[again]
    # The block that was released first is taken by the other one, and the first block of the prefix survives.
    assert run.steps[again - 1].tables[0][-1] == before.tables[victim][1] and resumed.batch.starts == [BLOCK]
    ample = Run(num_kvcache_blocks=12, max_model_len=pool * BLOCK)
    ample.add(FOX, OWL, max_tokens=30)
    ample.finish()
    assert [seq.token_ids for seq in ample.seqs] == [seq.token_ids for seq in run.seqs]
    tables = {f"step_{n}": run.steps[n].tables for n in (number - 1, number, again - 1, again)}
    return run, {
        "pool": pool,
        "pre_step": number,
        "pre_position": at.batch.starts[0],
        "pre_free": before.free,
        "pre_victim": victim,
        "pre_victim_tokens": resumed.batch.starts[0] + resumed.batch.counts[0],
        "pre_victim_blocks": before.tables[victim],
        "pre_tables": listing(**tables),
        "pre_again": again,
        "pre_start": resumed.batch.starts[0],
        "pre_count": resumed.batch.counts[0],
        "pre_kept": resumed.tables[victim][0],
        "pre_lost": before.tables[victim][1],
    }


def overlap() -> tuple[dict[str, Run], dict[str, object]]:
    """The same two requests without and with a step in flight while the next one is launched."""
    runs = {
        f"overlap={overlaps}": Run(num_kvcache_blocks=12, max_model_len=192, overlap=overlaps)
        for overlaps in (False, True)
    }
    for run in runs.values():
        run.add(COMPANION, FOLLOWED)
        run.finish()
    plain, overlapped = runs.values()
    assert [seq.token_ids for seq in plain.seqs] == [seq.token_ids for seq in overlapped.seqs]
    surplus = next(n for n, step in enumerate(overlapped.steps) if len(step.outputs) < len(step.seq_ids))
    ended = next(n for n, step in enumerate(overlapped.steps) if step.outputs[0][2])
    step = overlapped.steps[surplus]
    return runs, {
        "order_plain": order(plain),
        "order_overlapped": order(overlapped),
        "surplus_step": surplus,
        "ended_step": ended,
        "surplus": listing(
            requests=step.seq_ids,
            sampled=step.ids,
            committed=[(seq_id, token_id) for seq_id, token_id, _ in step.outputs],
        ),
    }


def order(run: Run) -> str:
    events: Iterator[str] = (f"{kind} {number}" for kind, number in run.events)
    return ", ".join(event for event, _ in zip(events, range(10), strict=False)) + ", ..."


def make() -> dict[str, str]:
    """Every file that this script writes, by its path within docs/."""
    torch.manual_seed(0)
    main_run, values = follow()
    hit, hit_values = share_prefix(main_run)
    chunked, chunk_values = chunk()
    preempted, preempt_values = preempt()
    runs, overlap_values = overlap()
    values |= hit_values | chunk_values | preempt_values | overlap_values
    values |= draw_tokens(main_run) | decode_text(main_run)
    return {
        "guide.md": fill((DOCS / "guide" / "template.md").read_text(), values),
        "pictures/prefill.svg": str(draw_pool(main_run.steps[0])),
        "pictures/prefix.svg": str(draw_pool(hit)),
        "pictures/chunks.svg": str(draw_chunks(chunked, chunk_values["budget"])),
        "pictures/preemption.svg": str(draw_occupancy(preempted)),
        "pictures/overlap.svg": str(draw_timeline(runs, num_steps=4)),
        "pictures/throughput.svg": str(
            draw_throughput(*read_table((ROOT / "README.md").read_text(), "tokens a second"))
        ),
    }


def main() -> None:
    for name, content in make().items():
        (DOCS / name).write_text(content)
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
