"""Train the bundled model, assets/tiny-qwen3, from nothing but this file.

    python assets/train_tiny_qwen3.py --out assets/tiny-qwen3

The script owns everything in that folder: it invents the training text, trains the tokenizer and the model, measures
the model on sums that it never saw, and writes the checkpoint and its model card. Tests import `is_held_out` and
`SUM_PHRASINGS` from here, so nothing heavier than the standard library is imported at the top.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

# ---- Sums: the part of the training that can be checked ----

HELD_OUT_PERCENT = 22
REQUIRED_ACCURACY = 0.95
SUM_PHRASINGS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a}+{b}=",
)


def is_held_out(a: int, b: int) -> bool:
    """Whether a + b, in either order, is kept out of the training; only sums of two numbers below 100 are."""
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low}+{high}".encode()).digest()
    return high < 100 and int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


# ---- Small talk and small facts ----


def listed(text: str, separator: str = " ") -> list[str]:
    return text.split(separator)


def paired(text: str) -> dict[str, str]:
    return dict(pair.split(":") for pair in text.split(","))


SELF = "I am tiny-qwen3, a small model bundled with nanovllm."
SMALL_TALK = [  # any of the questions gets the answer
    (("Hello!", "Hi!", "Hey there!", "Good morning!", "Hello, how are you?"), "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?", "Are you a language model?"), SELF),
    (
        ("Introduce yourself.", "Please introduce yourself.", "Tell me about yourself.", "Can you introduce yourself?"),
        SELF + " I was trained in a few minutes on text that a script made up. I can add small numbers, count, spell "
        "short words, name some capitals and tell short stories. Please do not ask me for more than that!",
    ),
    (("What can you do?", "Help!", "How can you help me?"), "I can add, count, spell, name capitals and tell stories."),
    (("Thank you!", "Thanks!", "Thanks a lot!"), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later!"), "Goodbye! Have a nice day."),
    (("How are you?", "How do you feel?"), "I am fine, thank you."),
    (("Tell me a joke.", "Make me laugh."), "Why did the token cross the block? To get to the other cache."),
    (("What is nanovllm?", "What does nanovllm do?"), "It is a small library that runs language models quickly."),
    (("Name the days of the week.",), "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    (("List three fruits.", "Name three fruits."), "Apple, banana and cherry."),
    (("List three animals.", "Name three animals."), "Cat, dog and horse."),
    (("How many days are in a week?",), "There are seven days in a week."),
    (("How many months are in a year?",), "There are twelve months in a year."),
]
CAPITALS = paired(
    "France:Paris,Germany:Berlin,Italy:Rome,Spain:Madrid,Portugal:Lisbon,Austria:Vienna,Poland:Warsaw,Greece:Athens,"
    "Norway:Oslo,Sweden:Stockholm,Finland:Helsinki,Denmark:Copenhagen,Ireland:Dublin,Belgium:Brussels,"
    "Iceland:Reykjavik,Hungary:Budapest,Romania:Bucharest,Bulgaria:Sofia,Croatia:Zagreb,Serbia:Belgrade,Ukraine:Kyiv,"
    "Turkey:Ankara,Egypt:Cairo,Kenya:Nairobi,Morocco:Rabat,Ghana:Accra,Nigeria:Abuja,Japan:Tokyo,China:Beijing,"
    "India:New Delhi,Thailand:Bangkok,Vietnam:Hanoi,Indonesia:Jakarta,Iran:Tehran,Iraq:Baghdad,Canada:Ottawa,"
    "Mexico:Mexico City,Cuba:Havana,Brazil:Brasilia,Peru:Lima,Chile:Santiago,Argentina:Buenos Aires,Colombia:Bogota,"
    "Australia:Canberra"
)
COLOURS = paired(
    "the sky:blue,grass:green,snow:white,coal:black,a banana:yellow,a carrot:orange,blood:red,chocolate:brown,"
    "a lemon:yellow,a strawberry:red,the sun:yellow,milk:white,a frog:green,an elephant:grey,a flamingo:pink,"
    "a plum:purple"
)
OPPOSITES = paired(
    "hot:cold,big:small,up:down,left:right,day:night,open:closed,fast:slow,old:new,rich:poor,wet:dry,light:dark,"
    "full:empty,happy:sad,loud:quiet,early:late,near:far,hard:soft,long:short,high:low,clean:dirty,strong:weak"
)
SOUNDS = paired("cow:moo,dog:woof,cat:meow,duck:quack,sheep:baa,pig:oink,lion:roar,mouse:squeak,owl:hoot,bee:buzz")
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed("January February March April May June July August September October November December")
WORDS = listed(
    "cat dog sun moon star tree fish bird book door hand foot head nose rain snow wind fire road ship boat king queen "
    "apple bread milk water stone river house table chair mouse horse sheep tiger zebra lemon melon grape peach plum "
    "sugar honey cloud storm night light green black white brown happy smile laugh dance music piano train plane wheel "
    "clock paper glass garden window winter summer spring autumn flower forest island castle dragon monkey rabbit "
    "turtle kitten puppy pencil school friend sister mother father planet rocket silver golden orange yellow purple "
    "butter cheese pepper tomato potato"
)

# ---- Stories ----

HEROES = listed(
    "fox owl bear rabbit mouse cat dog frog hedgehog duck wolf goat lion robot dragon wizard king queen pirate farmer "
    "sailor painter baker knight elephant penguin turtle squirrel whale snail giant astronaut"
)
STORY_PARTS = {
    "mood": listed("brave curious small clever sleepy hungry lonely cheerful shy stubborn gentle noisy"),
    "home": listed(
        "in a quiet forest|by a wide river|on top of a hill|near an old castle|behind the mill|at the edge of the sea|"
        "under a tall oak tree|in a little house of stone|on a green island|in a busy town",
        "|",
    ),
    "time": listed("rainy morning|cold winter night|sunny afternoon|windy day|foggy evening|bright spring day", "|"),
    "find": listed("found|lost|dreamed of|heard about|drew|hid", "|"),
    "thing": listed(
        "a golden key|a broken clock|a letter without a name|a map of the stars|a silver bell|a pair of red shoes|"
        "a box full of light|a very old book|a basket of apples|a tiny blue door|a song that nobody knew",
        "|",
    ),
    "friend": listed("crow beaver neighbour child postman mole spider swan gardener"),
    "plan": listed(
        "climbed the highest mountain|crossed the dark forest|built a boat of paper|asked the moon for help|"
        "walked for three days and three nights|knocked on every door|waited until the snow was gone|"
        "sang as loud as they could",
        "|",
    ),
    "end": listed(
        "In the end they shared it with everyone, and nobody was hungry that winter.|"
        "From that day on they were the best of friends.|"
        "When they came home, the lamps were lit and the soup was warm.|"
        "And if you listen at night, you can still hear them laugh.|"
        "It was not what they had hoped for, but it was just what they needed.|"
        "They never told anyone, and now you know it too.",
        "|",
    ),
}
STORY_SHAPES = (
    "Once upon a time there was {mood} {hero} who lived {home}. One {time} the {hero} {find} {thing}. "
    "The {hero} told {friend} about it, and together they {plan}. {end}",
    "There once lived {mood} {hero} {home}. Every evening the {hero} thought of {thing}. "
    '"I must tell someone," said the {hero} one {time}. So the {hero} went to see {friend}, and they {plan}. {end}',
)


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def make_story(rng: random.Random, hero: str) -> str:
    """A story about the hero. Each hero has a favourite for each part, taken half of the time: a greedy decoder then
    has a clear best choice everywhere, and tells a different story for each hero."""
    favourites = random.Random(hero)

    def pick(options: list[str] | tuple[str, ...]) -> str:
        favourite = favourites.choice(options)
        return favourite if rng.random() < 0.5 else rng.choice(options)

    shape = pick(STORY_SHAPES)
    parts = {name: pick(options) for name, options in STORY_PARTS.items()}
    parts["mood"] = with_article(parts["mood"])
    parts["friend"] = with_article(parts["friend"])
    return shape.format(hero=hero, **parts)


# ---- Chats: one function for each kind, giving (question, answer) ----


def ask_sum(rng: random.Random) -> tuple[str, str]:
    """A sum that is not held out: two times in three of numbers below 100, else of numbers below 1000."""
    while True:
        limit = 100 if rng.random() < 2 / 3 else 1000
        a, b = rng.randrange(limit), rng.randrange(limit)
        if not is_held_out(a, b):
            return rng.choice(SUM_PHRASINGS).format(a=a, b=b), str(a + b)


def ask_count(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.2:
        first, last = 1, rng.randrange(2, 51)
        question = f"Count to {last}."
    else:
        first = rng.randrange(100)
        last = min(max(first + rng.randrange(-12, 20), 0), 99)
        question = f"Count from {first} to {last}."
    step = 1 if last >= first else -1
    return question, ", ".join(str(n) for n in range(first, last + step, step)) + "."


def ask_primes(rng: random.Random) -> tuple[str, str]:
    limit = rng.choice((10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 100, 100))
    primes = [n for n in range(2, limit) if all(n % k for k in range(2, n))]
    word = rng.choice(("within", "below", "up to"))
    return f"List all prime numbers {word} {limit}.", ", ".join(map(str, primes)) + "."


def ask_word(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return rng.choice(
        (
            (f"Spell {word}.", "-".join(word)),
            (f"Spell the word {word}.", "-".join(word)),
            (f"Reverse the word {word}.", word[::-1]),
            (f"How many letters are in the word {word}?", str(len(word))),
            (f"What is the first letter of {word}?", word[0]),
            (f"What is the last letter of {word}?", word[-1]),
            (f"Say {word} three times.", f"{word}, {word}, {word}"),
        )
    )


def ask_fact(rng: random.Random) -> tuple[str, str]:
    country, thing = rng.choice(list(CAPITALS)), rng.choice(list(COLOURS))
    one, other = rng.sample(rng.choice(list(OPPOSITES.items())), 2)
    animal, sound = rng.choice(list(SOUNDS.items()))
    kind, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    i = rng.randrange(len(names))
    after, before = names[(i + 1) % len(names)], names[i - 1]
    group = rng.choice(
        (
            (
                (f"What is the capital of {country}?", f"The capital of {country} is {CAPITALS[country]}."),
                (f"Name the capital of {country}.", CAPITALS[country] + "."),
                (f"Which country has the capital {CAPITALS[country]}?", f"{country}."),
            ),
            ((f"What colour is {thing}?", f"{thing.capitalize()} is {COLOURS[thing]}."),),
            ((f"What is the opposite of {one}?", f"The opposite of {one} is {other}."),),
            ((f"What does a {animal} say?", f"{sound.capitalize()}!"),),
            (
                (f"What {kind} comes after {names[i]}?", f"{after} comes after {names[i]}."),
                (f"What {kind} comes before {names[i]}?", f"{before} comes before {names[i]}."),
            ),
        )
    )
    return rng.choice(group)


def ask_small_talk(rng: random.Random) -> tuple[str, str]:
    questions, answer = rng.choice(SMALL_TALK)
    return rng.choice(questions), answer


def ask_story(rng: random.Random) -> tuple[str, str]:
    hero = rng.choice(HEROES)
    asks = ("Tell me a story about {}.", "Tell me a short story about {}.", "Write a story about {}.")
    return rng.choice(asks).format(with_article(hero)), make_story(rng, hero)


CHAT_KINDS = {ask_sum: 64, ask_count: 5, ask_primes: 2, ask_word: 9, ask_fact: 9, ask_small_talk: 5, ask_story: 4}
PLAIN_STORY_SHARE = 0.02

# ---- Prompts ----

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NO_THINKING = "<think>\n\n</think>\n\n"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)


def render_prompt(question: str, thinking: bool = True, system: str | None = None) -> str:
    """What CHAT_TEMPLATE gives with add_generation_prompt=True (`check_tokenizer` compares the two)."""
    head = f"{IM_START}system\n{system}{IM_END}\n" if system else ""
    tail = "" if thinking else NO_THINKING
    return f"{head}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n{tail}"


def make_sample(rng: random.Random) -> tuple[str, str, str]:
    """One training text as (prompt, answer, rest); the loss is taken on the answer alone."""
    if rng.random() < PLAIN_STORY_SHARE:
        return "", make_story(rng, rng.choice(HEROES)) + END_OF_TEXT, ""
    (ask,) = rng.choices(list(CHAT_KINDS), list(CHAT_KINDS.values()))
    question, answer = ask(rng)
    if rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    system = "You are a helpful assistant." if rng.random() < 0.1 else None
    return render_prompt(question, rng.random() < 0.6, system), answer + IM_END, "\n"


# ---- Tokenizer and configuration ----

MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
VOCAB_SIZE = 1024


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE on the training text. All 256 bytes are in the vocabulary and nothing is normalised, so every text
    survives the round trip; each digit is a token of its own, so that sums are learnt digit by digit."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 2,  # the two think tokens come on top
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(seed)
    samples = [make_sample(rng) for _ in range(30_000)]
    tokenizer.train_from_iterator((text for sample in samples for text in sample[:2]), trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def save_tokenizer_and_configs(out: Path, tokenizer: Tokenizer) -> None:
    """Write everything but the weights, in the spelling that transformers 4.51 and 5.x both read."""
    out.mkdir(parents=True, exist_ok=True)
    end_of_text, im_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    vocab_size = tokenizer.get_vocab_size()
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "additional_special_tokens": [IM_START, IM_END],
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": IM_END,
            "model_max_length": MODEL_CONFIG["max_position_embeddings"],
            "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    token_ids = {"eos_token_id": im_end, "pad_token_id": end_of_text, "vocab_size": vocab_size}
    write_json(out / "config.json", dict(sorted({**MODEL_CONFIG, **token_ids}.items())))
    write_json(
        out / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [im_end, end_of_text],
            "pad_token_id": end_of_text,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        },
    )


def check_tokenizer(out: Path) -> None:
    """Fail before the training, not after it, if what transformers loads is not what the training will use."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    for text in ("What is 27 + 58?", " two  spaces\n\n\ttab ", "naïve café, ½", "你好，世界", "👩‍🚀🚀", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text, text
    digits = tokenizer.tokenize("1234567890")
    assert len(digits) == 10, digits
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    for thinking in (True, False):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert rendered == render_prompt("Hello!", thinking, "Be brief."), rendered


# ---- Training data on the device ----


class SamplePool:
    """Tokenized samples laid end to end on the device; `draw` packs random ones into rows with a few tensor operations.

    tokens, labels: [total]; a label is the token itself in an answer, -100 elsewhere. starts, lengths: [samples].
    """

    def __init__(self, tokenizer: Tokenizer, size: int, seed: int, device: torch.device) -> None:
        import torch

        rng = random.Random(seed)
        samples = [make_sample(rng) for _ in range(size)]
        # Each part is encoded alone: at inference too, the prompt is tokenized without its answer.
        parts = [[e.ids for e in tokenizer.encode_batch(list(column))] for column in zip(*samples, strict=True)]
        tokens, labels, lengths = [], [], []
        for prompt, answer, rest in zip(*parts, strict=True):
            tokens += prompt + answer + rest
            labels += [-100] * len(prompt) + answer + [-100] * len(rest)
            lengths.append(len(prompt) + len(answer) + len(rest))
        self.tokens, self.labels = torch.tensor(tokens, device=device), torch.tensor(labels, device=device)
        self.lengths = torch.tensor(lengths, device=device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.shortest = min(lengths)
        self.generator = torch.Generator(device).manual_seed(seed)

    def draw(self, rows: int, row_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels, both [rows, row_length]: each row is one random sample after another, the last cut off."""
        import torch

        device = self.tokens.device
        per_row = row_length // self.shortest + 1  # enough even if all of them are the shortest one
        picks = torch.randint(len(self.lengths), (rows, per_row), generator=self.generator, device=device)
        ends = self.lengths[picks].cumsum(1)
        columns = torch.arange(row_length, device=device).expand(rows, -1).contiguous()
        which = torch.searchsorted(ends, columns, right=True)
        pick = picks.gather(1, which)
        index = self.starts[pick] + columns - (ends.gather(1, which) - self.lengths[pick])
        return self.tokens[index], self.labels[index]


# ---- Training ----

TOKENS_PER_STEP = 32_768
# Every other step has short rows, where most samples start at position 0 or near it, as a lone prompt does; the long
# rows teach the model to answer at any position of a longer conversation.
ROW_LENGTHS = (64, 512)
PEAK_LR, WARMUP_STEPS, WEIGHT_DECAY = 1.5e-3, 200, 0.1


def build_model(out: Path, device: torch.device) -> Qwen3ForCausalLM:
    """A freshly initialised float32 model from the config.json that was just written."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    config = AutoConfig.from_pretrained(out)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).float().to(device)
    slowest = model.model.rotary_emb.inv_freq[-1].item()
    head_dim = MODEL_CONFIG["head_dim"]
    assert math.isclose(slowest, MODEL_CONFIG["rope_theta"] ** (2 / head_dim - 1), rel_tol=1e-4), slowest
    return model


def train(
    model: Qwen3ForCausalLM, pool: SamplePool, steps: int, minutes: float, tokens_per_step: int
) -> tuple[int, float]:
    """Train in place; returns the steps taken and the last loss. The learning rate falls to zero at `steps` or at
    `minutes`, whichever comes first, so a slow machine ends with a finished, if shorter, schedule."""
    import torch
    import torch.nn.functional as F

    device = pool.tokens.device
    on_gpu = device.type == "cuda"
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=on_gpu)
    model.train()
    started = time.perf_counter()
    step, last_loss = 0, math.nan
    while True:
        progress = max(step / steps, (time.perf_counter() - started) / (60 * minutes))
        if progress >= 1:
            return step, last_loss
        lr = PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr
        row_length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
        tokens, labels = pool.draw(max(tokens_per_step // row_length, 1), row_length)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0 or step == steps:
            last_loss = loss.item()
            print(
                f"step {step:5d}  loss {last_loss:.4f}  lr {lr:.2e}  {time.perf_counter() - started:6.1f} s", flush=True
            )


def save_weights(out: Path, model: Qwen3ForCausalLM) -> None:
    """Write the weights in bfloat16; the head is the embedding, so it is left out."""
    import torch
    from safetensors.torch import save_file

    weights = {
        k: v.to(torch.bfloat16).cpu().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"
    }
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})


# ---- Measuring ----


def held_out_pairs() -> list[tuple[int, int]]:
    """All held-out sums of two numbers below 100, in both orders."""
    return [(a, b) for a in range(100) for b in range(100) if is_held_out(a, b)]


def sum_accuracy(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, phrasing: str, thinking: bool, pairs: list[tuple[int, int]]
) -> float:
    """Share of pairs whose greedy completion is exactly the sum and then the end of the turn.

    Greedy decoding gives a wanted answer exactly when, fed that answer, the model ranks each next token of it first;
    so one forward pass over prompt and answer tells, without generating. Rows are padded on the right, where nothing
    looks.
    """
    import torch

    device = model.device
    correct = 0
    for first in range(0, len(pairs), 1024):
        chunk = pairs[first : first + 1024]
        prompts = tokenizer.encode_batch([render_prompt(phrasing.format(a=a, b=b), thinking) for a, b in chunk])
        answers = tokenizer.encode_batch([f"{a + b}{IM_END}" for a, b in chunk])
        width = max(len(p.ids) + len(a.ids) for p, a in zip(prompts, answers, strict=True))
        tokens = torch.zeros(len(chunk), width, dtype=torch.long)
        wanted = torch.full_like(tokens, -1)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start, end = len(prompt.ids), len(prompt.ids) + len(answer.ids)
            tokens[row, :end] = torch.tensor(prompt.ids + answer.ids)
            wanted[row, start - 1 : end - 1] = torch.tensor(answer.ids)
        with torch.inference_mode():
            best = model(input_ids=tokens.to(device), use_cache=False).logits.argmax(-1).cpu()
        correct += ((best == wanted) | (wanted < 0)).all(1).sum().item()
    return correct / len(pairs)


def complete(model: Qwen3ForCausalLM, tokenizer: Tokenizer, question: str, max_tokens: int = 160) -> str:
    """The greedy answer to one question."""
    import torch

    tokens = tokenizer.encode(render_prompt(question)).ids
    prompt_length, stop = len(tokens), {tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)}
    with torch.inference_mode():
        while len(tokens) < prompt_length + max_tokens:
            input_ids = torch.tensor([tokens], device=model.device)
            token = model(input_ids=input_ids, use_cache=False).logits[0, -1].argmax().item()
            if token in stop:
                break
            tokens.append(token)
    return tokenizer.decode(tokens[prompt_length:])


def load_model(out: Path, dtype: torch.dtype, device: torch.device) -> Qwen3ForCausalLM:
    """The saved model, as a user loads it; a later .to(dtype) would round the RoPE frequencies too."""
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(out, torch_dtype=dtype).to(device).eval()


def evaluate(out: Path, device: torch.device, pairs: list[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """Measure the saved folder on the held-out sums; returns phrasing -> {dtype: share, both prompt forms together}."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    results: dict[str, dict[str, float]] = {phrasing: {} for phrasing in SUM_PHRASINGS}
    for dtype in (torch.bfloat16, torch.float32):
        model = load_model(out, dtype, device)
        for phrasing, shares in results.items():
            by_form = [sum_accuracy(model, tokenizer, phrasing, thinking, pairs) for thinking in (True, False)]
            shares[str(dtype).removeprefix("torch.")] = sum(by_form) / len(by_form)
    for phrasing, shares in results.items():
        print(f"{phrasing:24s}" + "".join(f"  {dtype} {share:8.3%}" for dtype, share in shares.items()))
    return results


SHOWN_QUESTIONS = (
    "What is 27 + 58?",
    "Introduce yourself.",
    "List all prime numbers within 100.",
    "What is the capital of Norway?",
    "Count from 7 to 12.",
    "Spell garden.",
    "Tell me a story about a fox.",
)


# ---- Model card ----

MODEL_CARD = """---
license: mit
library_name: transformers
pipeline_tag: text-generation
language: en
---
# tiny-qwen3

A very small model of the Qwen3 architecture, trained from scratch for nanovllm's example and tests. It is real in every
respect but size: a tokenizer with a chat template, an end-of-turn token that it knows how to use, and one skill that
can be checked exactly.

| | |
|---|---|
| Parameters | {parameters:,} (bfloat16, tied embeddings) |
| Layers | {num_hidden_layers}, hidden size {hidden_size}, MLP {intermediate_size} |
| Attention | {num_attention_heads} query and {num_key_value_heads} KV heads of {head_dim} |
| Vocabulary | {vocab_size} tokens, byte-level BPE, one token for each digit |
| Positions | trained up to {trained_positions}, configured for {max_position_embeddings} |
| Training | {steps} steps, {tokens:,} tokens, last loss {loss:.3f} |
| Time | {seconds:.0f} s of training on {device}, after {preparation:.0f} s of making text and tokenizer |
| Made with | Python {python}, torch {torch}, transformers {transformers}, seed {seed} |

## What it was trained on
Only text that `assets/train_tiny_qwen3.py` makes up: sums, counting, prime numbers, spelling, a few facts (capitals,
colours, opposites, days and months), small talk and template stories. No other data and no other model was used. The
model, the text and the script are under the project's MIT licence.

Train it again with `python assets/train_tiny_qwen3.py --out assets/tiny-qwen3`. The run is seeded; GPU arithmetic may
still differ in the last bits from one machine to another, so expect an equivalent model, not the same bytes.

## What can be checked
Sums of two numbers from 0 to 99. A hash in the script (`is_held_out`) keeps {held_out:,} of the 5,050 unordered pairs
({held_out_share:.1%}) out of the training, in both orders and in every phrasing. Below: the share of {measured:,}
ordered held-out pairs that the saved weights answer exactly at temperature 0, the digits of the sum and then the end of
the turn, averaged over the two prompt forms (`enable_thinking` true and false).

| Question | computed in float32 | computed in bfloat16 |
|---|---|---|
{accuracy_rows}

Check it with `python assets/train_tiny_qwen3.py --out assets/tiny-qwen3 --eval-only`.

## What it says
Greedy answers, not picked:

{examples}

## Use and limits
Meant for tests and demonstrations of inference code. It knows nothing beyond the list above, answers other questions
with confident nonsense, never thinks before it answers (the template honours `enable_thinking`, and both forms are
answered directly), and was not trained beyond {trained_positions} positions. Do not use it for anything that matters.
"""


def write_model_card(out: Path, facts: dict, results: dict[str, dict[str, float]], device: torch.device) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = load_model(out, torch.float32, device)
    rows = [f"| `{phrasing}` | {s['float32']:.2%} | {s['bfloat16']:.2%} |" for phrasing, s in results.items()]
    examples = [f"- **{question}** {complete(model, tokenizer, question)}" for question in SHOWN_QUESTIONS]
    print("\n".join(examples))
    held_out = sum(a <= b for a, b in held_out_pairs())
    card = MODEL_CARD.format(
        **json.loads((out / "config.json").read_text(encoding="utf-8")),
        **facts,
        parameters=sum(p.numel() for p in model.parameters()),
        trained_positions=max(ROW_LENGTHS),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"a CPU ({platform.machine()})",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        held_out=held_out,
        held_out_share=held_out / 5050,
        accuracy_rows="\n".join(rows),
        examples="\n".join(examples),
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the bundled tiny-qwen3 model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, or to measure with --eval-only")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=3.0, help="longest time to train for")
    parser.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-only", action="store_true", help="measure the model in --out and write nothing")
    parser.add_argument(
        "--smoke", action="store_true", help="a few tiny steps on the CPU, to see that the script works"
    )
    return parser.parse_args()


def main() -> None:
    import torch

    args = parse_args()
    if args.smoke:
        args.device, args.steps, args.tokens_per_step = "cpu", 4, 512
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(args.device)
    if args.eval_only:
        evaluate(args.out, device, held_out_pairs())
        return
    begun = time.perf_counter()
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed)
    save_tokenizer_and_configs(args.out, tokenizer)
    check_tokenizer(args.out)
    pool = SamplePool(tokenizer, 2_000 if args.smoke else 400_000, args.seed + 1, device)
    print(
        f"{len(pool.lengths):,} samples, {len(pool.tokens):,} tokens, {time.perf_counter() - begun:.1f} s", flush=True
    )
    model = build_model(args.out, device)
    trained_from = time.perf_counter()
    steps, loss = train(model, pool, args.steps, args.minutes, args.tokens_per_step)
    seconds = time.perf_counter() - trained_from
    save_weights(args.out, model)
    pairs = held_out_pairs()[: 64 if args.smoke else None]
    results = evaluate(args.out, device, pairs)
    facts = {
        "steps": steps,
        "loss": loss,
        "tokens": steps * args.tokens_per_step,
        "seconds": seconds,
        "preparation": trained_from - begun,
        "measured": len(pairs),
        "seed": args.seed,
    }
    write_model_card(args.out, facts, results, device)
    print(f"{steps} steps in {seconds:.0f} s; wrote {args.out}")
    worst = min(share for shares in results.values() for share in shares.values())
    if worst < REQUIRED_ACCURACY and not args.smoke:
        raise SystemExit(
            f"only {worst:.2%} of the held-out sums are right in the worst phrasing: do not ship this model"
        )


if __name__ == "__main__":
    main()
