"""Chat with a model: several prompts in one batched call.

python example.py                          the small model that comes with the project
python example.py --model Qwen/Qwen3-0.6B  any Qwen3 checkpoint, a directory or a hub id
"""

import argparse
from pathlib import Path

from nanovllm import LLM, SamplingParams

BUNDLED_MODEL = Path(__file__).parent / "assets" / "tiny-qwen3"
QUESTIONS = [
    "Who are you?",
    "What is 27 + 58?",
    "What is the capital of France?",
    "Count from 3 to 9.",
    "What day comes after Monday?",
    "Tell me a story about a fox.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED_MODEL), help="directory or hub id of a Qwen3 checkpoint")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, higher is more varied")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="what to ask")
    args = parser.parse_args()

    llm = LLM(args.model)
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for question in args.questions],
        SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens),
        chat_template_kwargs={"enable_thinking": False},
    )
    for question, output in zip(args.questions, outputs, strict=True):
        print(f"\nPrompt: {question}\nCompletion: {output['text']}")


if __name__ == "__main__":
    main()
