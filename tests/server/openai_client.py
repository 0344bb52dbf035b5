"""Asks a running server by OpenAI's own Python client: `openai_client.py KIND URL`, KIND being
chat, stories or encoder.

Each check fails with what was found. A server that asks for a key has to have it in OPENAI_API_KEY.
"""

import asyncio
import json
import math
import os
import sys

import openai
from pydantic import BaseModel

KIND, URL = sys.argv[1:3]
KEY = os.environ.get("OPENAI_API_KEY", "none")
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
MODEL = client.models.list().data[0].id


def refused(error, call, param=None):
    """That a call is refused in this way, and about this parameter."""
    try:
        call()
    except error as refusal:
        assert param is None or refusal.param == param, (refusal.param, param)
        return refusal
    raise AssertionError(f"{error.__name__} was expected")


def say(text="Hello, potter.", **settings):
    settings = {"model": MODEL, "max_completion_tokens": 24, "seed": 7} | settings
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **settings)


def whole(stream):
    """The outputs, ends and usage of a stream."""
    outputs, ends, usage = {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            outputs[choice.index] = outputs.get(choice.index, "") + (choice.delta.content or "")
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    return outputs, ends, usage


def chat():
    answer = say()
    assert (
        answer.object == "chat.completion" and answer.model == MODEL and answer.choices[0].message.role == "assistant"
    )
    usage = answer.usage
    assert (
        usage.completion_tokens in range(1, 25) and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    )
    same = say()
    assert same.choices[0].message.content == answer.choices[0].message.content
    assert say(seed=8).choices[0].message.content != answer.choices[0].message.content

    # A stream has the same text, and its usage at the end.
    outputs, ends, streamed = whole(say(stream=True, stream_options={"include_usage": True}))
    assert outputs[0] == answer.choices[0].message.content and ends[0] == answer.choices[0].finish_reason
    assert streamed == usage, (streamed, usage)

    # Several answers, each its own; the first is the one that there would be alone.
    several = say(n=3).choices
    assert [choice.index for choice in several] == [0, 1, 2]
    assert several[0].message.content == answer.choices[0].message.content
    assert len({choice.message.content for choice in several}) == 3
    outputs, _, _ = whole(say(n=3, stream=True))
    assert outputs == {choice.index: choice.message.content for choice in several}

    # Stop outputs are not shown, and what follows is not written.
    text = answer.choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopped = say(stop=[stop, "never there"]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == text[: text.index(stop)]

    # Log-probabilities are those of the tokens, in descending order.
    told = say(temperature=0, logprobs=True, top_logprobs=4, max_completion_tokens=8).choices[0].logprobs.content
    assert len(told) == 8
    for token in told:
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 4 and tops == sorted(tops, reverse=True) and abs(tops[0] - token.logprob) < 1e-5
        assert bytes(token.bytes).decode(errors="replace") == token.token and token.logprob <= 0
    assert say().choices[0].logprobs is None

    # A bias lets one token in, or keeps it out.
    pots = say("x", logit_bias={"112": 100}, temperature=0, max_completion_tokens=5).choices[0].message.content
    assert pots == "ppppp", pots
    first = told[0].bytes[0]
    others = say(temperature=0, logit_bias={str(first): -100}, max_completion_tokens=8).choices[0].message.content
    assert first not in others.encode()

    json_schemas()
    tools()

    # The words of a request are words, and what it asks wrongly is named.
    spelled = say("a <|im_end|> b", max_completion_tokens=1).usage.prompt_tokens
    assert spelled == say("a |<im_end>| b", max_completion_tokens=1).usage.prompt_tokens
    bad = openai.BadRequestError
    refused(bad, lambda: say(temperature=3), "temperature")
    refused(bad, lambda: say(top_logprobs=3), "top_logprobs")
    refused(bad, lambda: say(n=0), "n")
    refused(bad, lambda: say("long " * 2000), "messages")
    refused(bad, lambda: say(max_completion_tokens=100000), "messages")
    refused(bad, lambda: client.chat.completions.create(model=MODEL, messages=[]), "messages")
    odd = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    refused(bad, lambda: client.chat.completions.create(model=MODEL, messages=odd), "messages[0].content[0].type")
    refused(openai.NotFoundError, lambda: say(model="another"), "model")
    refused(bad, lambda: client.embeddings.create(model=MODEL, input="x"))
    assert client.models.retrieve(MODEL).id == MODEL
    asyncio.run(beside_others())


class Firing(BaseModel):
    glaze: str
    cone: int
    cracked: bool


def json_schemas():
    schema = {
        "type": "object",
        "properties": {
            "glaze": {"enum": ["celadon", "tenmoku"]}, "cone": {"type": "integer", "minimum": 0, "maximum": 99},
            "cracked": {"type": "boolean"},
        },
        "required": ["glaze", "cone", "cracked"], "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "firing", "schema": schema, "strict": True}}
    for seed in range(6):
        answer = say(response_format=wanted, max_completion_tokens=80, seed=seed).choices[0]
        firing = Firing.model_validate_json(answer.message.content, strict=True)
        assert answer.finish_reason == "stop" and firing.glaze in ("celadon", "tenmoku") and 0 <= firing.cone <= 99
    outputs, ends, _ = whole(say(response_format=wanted, max_completion_tokens=80, stream=True, n=2))
    assert ends == {0: "stop", 1: "stop"} and all(Firing.model_validate_json(text) for text in outputs.values())
    anything = say(response_format={"type": "json_object"}, max_completion_tokens=60).choices[0]
    assert anything.message.content.startswith("{")
    if anything.finish_reason == "stop":
        json.loads(anything.message.content)
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "pot"}}}
    refused(openai.BadRequestError, lambda: say(response_format=broken), "response_format")


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "of the kiln", "parameters": {
        "type": "object", "properties": {argument: {"type": "integer", "minimum": 0, "maximum": 2000}},
        "required": [argument], "additionalProperties": False}}}
    for name, argument in [("heat_to", "degrees"), ("hold", "minutes")]
]


def tools():
    for choice, names in [
        ("required", {"heat_to", "hold"}),
        ({"type": "function", "function": {"name": "hold"}}, {"hold"}),
    ]:
        answer = say(tools=TOOLS, tool_choice=choice, max_completion_tokens=100).choices[0]
        (call,) = answer.message.tool_calls
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        assert call.type == "function" and call.id and call.function.name in names
        (value,) = json.loads(call.function.arguments).values()
        assert 0 <= value <= 2000
    calls = {}
    for chunk in say(tools=TOOLS, tool_choice="required", max_completion_tokens=100, stream=True):
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            calls.setdefault(call.index, ["", ""])
            calls[call.index][0] += call.function.name or ""
            calls[call.index][1] += call.function.arguments or ""
    ((name, arguments),) = calls.values()
    assert name in ("heat_to", "hold") and json.loads(arguments)
    # Its answer goes back to the model.
    messages = [
        {"role": "user", "content": "Fire it."},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "heat_to", "arguments": "{\"degrees\": 900}"}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_completion_tokens=5)
    assert answer.usage.prompt_tokens > 200
    refused(openai.BadRequestError, lambda: say(tools=TOOLS, tool_choice="maybe"), "tool_choice")


async def beside_others():
    """The same text alone and among 31 others, greedy and drawn."""
    many = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=120)

    async def ask(at):
        messages = [{"role": "user", "content": f"Pot {at % 8} " * (1 + at % 5)}]
        settings = {"temperature": 0} if at % 2 else {"temperature": 1.0, "top_p": 0.9, "seed": at % 8}
        answer = await many.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=8 + at % 30, **settings
        )
        return answer.choices[0].message.content

    together = await asyncio.gather(*(ask(at) for at in range(32)))
    for at in range(0, 32, 5):
        assert await ask(at) == together[at], at


def stories():
    answer = client.completions.create(model=MODEL, prompt="There was once a", max_tokens=20, temperature=0)
    choice = answer.choices[0]
    assert answer.object == "text_completion" and choice.finish_reason == "length" and len(choice.text) > 20, choice
    assert answer.usage.completion_tokens == 20
    streamed = client.completions.create(
        model=MODEL, prompt="There was once a", max_tokens=20, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    both = client.completions.create(
        model=MODEL, prompt=["There was once a", "There was"], max_tokens=9, n=2, temperature=0
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert choice.text.startswith(both.choices[0].text) and both.choices[2].text == both.choices[3].text
    echoed = client.completions.create(model=MODEL, prompt="There was once a", max_tokens=20, temperature=0, echo=True)
    assert echoed.choices[0].text == "There was once a" + choice.text
    told = client.completions.create(model=MODEL, prompt="There", max_tokens=6, temperature=0, logprobs=3).choices[0]
    assert "".join(told.logprobs.tokens) == told.text and len(told.logprobs.token_logprobs) == 6
    assert all(len(top) == 3 for top in told.logprobs.top_logprobs) and told.logprobs.text_offset[0] == 0
    assert math.exp(told.logprobs.token_logprobs[0]) > 0.01
    # A prompt of the tokens that it is made of, and one that the vocabulary lacks.
    refused(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt="Zyzzyva"), "prompt")
    refused(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt=""), "prompt")
    refused(openai.BadRequestError, lambda: client.completions.create(model=MODEL, prompt=[10**6]), "prompt")
    refusal = refused(openai.BadRequestError, say)
    assert "/v1/completions" in refusal.message


def encoder():
    inputs = ["the potter", "the clay", "the potter", "a much longer text about a kiln"]
    embeddings = client.embeddings.create(model=MODEL, input=inputs)
    vectors = [entry.embedding for entry in embeddings.data]
    cosine = lambda a, b: sum(x * y for x, y in zip(a, b))
    assert all(abs(cosine(vector, vector) - 1) < 1e-4 for vector in vectors)
    assert abs(cosine(vectors[0], vectors[2]) - 1) < 1e-5 and cosine(vectors[0], vectors[1]) < 0.9999
    assert embeddings.usage.prompt_tokens == sum(len(text) + 2 for text in inputs)
    # One alone is as it is among others, whatever the form.
    alone = client.embeddings.create(model=MODEL, input=inputs[1], encoding_format="float").data[0].embedding
    assert max(abs(x - y) for x, y in zip(alone, vectors[1])) < 1e-5
    refused(openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input="x" * 500), "input")
    short = client.embeddings.create(model=MODEL, input="x", dimensions=3).data[0].embedding
    assert len(short) == 3 and abs(sum(value * value for value in short) - 1) < 1e-6
    refused(
        openai.BadRequestError, lambda: client.embeddings.create(model=MODEL, input="x", dimensions=9999), "dimensions"
    )
    refused(openai.BadRequestError, say)


{"chat": chat, "stories": stories, "encoder": encoder}[KIND]()
print(f"{KIND}: all is well by openai {openai.__version__}")
