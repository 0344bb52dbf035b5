"""Asks a running server by frameworks that many programs are made with: `clients.py URL`.

The model is that of `models.py`, whose words make no sense: what is asked for by a grammar is well
formed, and all else has to end. Each check fails with what was found.
"""

import asyncio
import json
import os
import sys
import warnings
from importlib.metadata import version
from typing import Literal

# Nothing is to be sent elsewhere.
os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "OPENAI_API_KEY": "none"}

import agents
import instructor
import langchain_openai
import openai
import pydantic_ai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool as langchain_tool
from pydantic import BaseModel, Field
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

# OpenAI's client warns of its own models.
warnings.filterwarnings("ignore", "Pydantic serializer warnings")
URL = f"{sys.argv[1]}/v1"
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120)
asynchronous = openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120)
agents.set_default_openai_client(asynchronous, use_for_tracing=False)
MODEL = client.models.list().data[0].id
# What ends a string, a number, a list and an object of JSON is likely, and so is the end of a text:
# a model that knows no words goes on and on.
BIAS = {"34": 8, "44": 3, "93": 7, "125": 9, "257": 4}
# Enough for all that is asked for; some clients fail where an answer is cut off there.
MOST = 800


class Pot(BaseModel):
    """A pot in a kiln."""

    glaze: Literal["celadon", "tenmoku"]
    name: str
    lid: bool = False


class Shelf(BaseModel):
    height: int = Field(description="in millimetres")
    pots: list[Pot]


class Firing(BaseModel):
    """What is fired, and how hot."""

    cone: Literal["06", "6", "10"]
    shelf: Shelf
    second: Shelf | None


class Heat(BaseModel):
    degrees: int
    steps: list[Literal["slow", "fast"]]


def a_plain_request():
    """OpenAI's own client, by `responses.create`, `stream` and `parse`."""
    text = client.responses.create(
        model=MODEL, instructions="You fire pots.", input="Hello.", max_output_tokens=20, metadata={"kiln": "2"},
        extra_body={"seed": 7},
    )
    assert text.object == "response" and text.id.startswith("resp_") and text.model == MODEL, text
    assert text.metadata == {"kiln": "2"} and text.instructions == "You fire pots." and text.store is False, text
    usage = text.usage
    assert usage.output_tokens in range(1, 21) and usage.total_tokens == usage.input_tokens + usage.output_tokens, usage
    assert usage.input_tokens_details.cached_tokens >= 0 and usage.output_tokens_details.reasoning_tokens == 0, usage
    assert (text.status, text.incomplete_details.reason) == ("incomplete", "max_output_tokens"), text
    (message,) = text.output
    assert message.type == "message" and message.status == "incomplete" and text.output_text, message

    # The same words as a conversation of a chat, and as a stream.
    chat = client.chat.completions.create(
        model=MODEL, max_completion_tokens=20, seed=7,
        messages=[{"role": "system", "content": "You fire pots."}, {"role": "user", "content": "Hello."}],
    )
    assert chat.choices[0].message.content == text.output_text and chat.usage.prompt_tokens == usage.input_tokens
    events = list(
        client.responses.create(
            model=MODEL,
            instructions="You fire pots.",
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Hello."}]}],
            max_output_tokens=20,
            extra_body={"seed": 7},
            stream=True,
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events if event.type != "response.output_text.delta"]
    assert names == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "incomplete",
    ], names
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text.output_text
    assert events[-1].response.output_text == text.output_text and events[-1].response.usage == usage, events[-1]

    # JSON of a schema, whole and in pieces.
    parsed = client.responses.parse(
        model=MODEL,
        input="Fire it.",
        text_format=Firing,
        max_output_tokens=MOST,
        extra_body={"logit_bias": BIAS, "seed": 1},
    )
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Firing), parsed
    with client.responses.stream(
        model=MODEL,
        input="Fire it.",
        text_format=Firing,
        max_output_tokens=MOST,
        extra_body={"logit_bias": BIAS, "seed": 1},
    ) as stream:
        assert any(event.type == "response.output_text.done" and event.parsed for event in stream)
        assert stream.get_final_response().output_parsed == parsed.output_parsed

    # A call, whole and in pieces; its answer goes back.
    tool = openai.pydantic_function_tool(Firing, name="fire")["function"]
    tools = [{"type": "function", **tool}]
    for choice in ["required", {"type": "function", "name": "fire"}]:
        called = client.responses.parse(
            model=MODEL, input="Fire it.", tools=tools, tool_choice=choice, max_output_tokens=MOST,
            extra_body={"logit_bias": BIAS, "seed": 1},
        )
        (call,) = called.output
        assert call.type == "function_call" and call.name == "fire" and call.call_id and call.id.startswith("fc_"), call
        assert Firing.model_validate_json(call.arguments) and called.status == "completed"
    events = list(client.responses.create(
        model=MODEL, input="Fire it.", tools=tools, tool_choice="required", max_output_tokens=MOST,
        extra_body={"logit_bias": BIAS, "seed": 1}, stream=True,
    ))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]
    assert events[3].delta == events[4].arguments == call.arguments and events[4].name == "fire"
    thought = {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "It is cold."}],
    }
    told = client.responses.create(
        model=MODEL, tools=tools, max_output_tokens=5,
        input=[
            {"role": "user", "content": "Fire it."}, thought, *called.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
        ],
    )
    assert told.usage.input_tokens > called.usage.input_tokens + len(call.arguments)

    # Log-probabilities, where they are asked for.
    told = client.responses.create(
        model=MODEL, input="x", max_output_tokens=4, top_logprobs=2, include=["message.output_text.logprobs"],
    )
    logprobs = told.output[0].content[0].logprobs
    assert len(logprobs) == told.usage.output_tokens and all(len(token.top_logprobs) == 2 for token in logprobs)

    # What cannot be followed is refused by its own name.
    for settings, param in [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 10**6}, "input"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "pot"}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": tools, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": []}, "input"),
        ({"input": "long " * 9000}, "input"),
        ({"extra_body": {"response_format": {}}}, "response_format"),
    ]:
        try:
            client.responses.create(**({"model": MODEL, "input": "x", "max_output_tokens": 2} | settings))
        except openai.BadRequestError as refusal:
            assert refusal.param == param, (settings, refusal)
        else:
            raise AssertionError(f"{settings} was taken")


@agents.function_tool
def fire(firing: Firing) -> str:
    """Fires a kiln.

    Args:
        firing: all of it
    """
    assert isinstance(firing.shelf.height, int)
    return f"{len(firing.shelf.pots)} pots at cone {firing.cone}"


@agents.function_tool
def heat(heats: list[Heat]) -> str:
    """Heats a kiln."""
    return f"{len(heats)} times"


async def by_openai_agents():
    """Its default API, which is Responses, and that of chats."""
    settings = agents.ModelSettings(
        max_tokens=MOST, temperature=1.0, parallel_tool_calls=False, extra_body={"logit_bias": BIAS, "seed": 3},
    )
    for model in [MODEL, agents.OpenAIChatCompletionsModel(MODEL, asynchronous)]:
        of = lambda **more: agents.Agent(name="potter", instructions="You fire pots.", model=model, **more)
        structured = of(output_type=Firing, model_settings=settings)
        result = await agents.Runner.run(structured, "Fire it.")
        assert isinstance(result.final_output, Firing), result
        streamed = agents.Runner.run_streamed(structured, "Fire it.")
        kinds = {event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"}
        assert streamed.final_output == result.final_output and "response.output_text.delta" in kinds, kinds
        # A call, its answer, and words about it.
        forced = settings.resolve(agents.ModelSettings(tool_choice="required"))
        caller = of(tools=[fire, heat], model_settings=forced)
        result = await agents.Runner.run(caller, "Fire it.", max_turns=8)
        kinds = [item.type for item in result.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and isinstance(result.final_output, str), kinds
        # All of it is said again, with a question more.
        more = await agents.Runner.run(
            of(model_settings=settings), [*result.to_input_list(), {"role": "user", "content": "And now?"}],
        )
        assert isinstance(more.final_output, str)
        # A required call is combined with a schema for the answer after it.
        last = of(tools=[fire], model_settings=forced, tool_use_behavior="stop_on_first_tool", output_type=Firing)
        streamed = agents.Runner.run_streamed(last, "Fire it.")
        kinds = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
        assert kinds == ["tool_called", "tool_output"] and "pots at cone" in streamed.final_output, kinds


def pydantic_models():
    provider = OpenAIProvider(openai_client=asynchronous)
    return [OpenAIResponsesModel(MODEL, provider=provider), OpenAIChatModel(MODEL, provider=provider)]


async def by_pydantic_ai():
    settings = {"max_tokens": MOST, "extra_body": {"logit_bias": BIAS, "seed": 5}}
    for model in pydantic_models():
        for output in [Firing, pydantic_ai.ToolOutput(Firing, name="fire"), pydantic_ai.NativeOutput(Firing)]:
            agent = pydantic_ai.Agent(model, output_type=output, instructions="You fire pots.", model_settings=settings)
            result = await agent.run("Fire it.")
            assert isinstance(result.output, Firing) and result.usage.output_tokens > 10, result
        # Structured output by a tool, among other tools: a call of any of them is required each
        # time.
        agent = pydantic_ai.Agent(model, output_type=Firing, system_prompt="You fire pots.", model_settings=settings)
        heats = []

        @agent.tool_plain
        def heat(heats_: list[Heat]) -> str:
            """Heats a kiln."""
            heats.append(heats_)
            return "hot"

        for seed in range(3):
            seeded = settings | {"extra_body": {"logit_bias": BIAS, "seed": seed}}
            result = await agent.run("Heat it, then fire it.", model_settings=seeded, message_history=None)
            assert isinstance(result.output, Firing), result
        async with agent.run_stream("Fire it.") as streamed:
            assert isinstance(await streamed.get_output(), Firing)
        # Words, whole and as a stream; and both again with what was said before.
        agent = pydantic_ai.Agent(model, model_settings=settings | {"max_tokens": 30})
        first = await agent.run("Hello.")
        async with agent.run_stream(
            "And now?", message_history=result.all_messages() + first.all_messages()
        ) as streamed:
            assert await streamed.get_output()


def by_instructor():
    modes = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS]
    for mode in modes:
        asked = instructor.from_openai(client, mode=mode)
        settings = {"max_output_tokens" if mode == instructor.Mode.RESPONSES_TOOLS else "max_tokens": MOST}
        firing, answer = asked.chat.completions.create_with_completion(
            model=MODEL, response_model=Firing, messages=[{"role": "user", "content": "Fire it."}], max_retries=1,
            extra_body={"logit_bias": BIAS, "seed": 11}, **settings,
        )
        assert isinstance(firing, Firing) and answer.id, firing


@langchain_tool
def load(firing: Firing) -> str:
    """Loads a kiln."""
    return f"{len(firing.shelf.pots)} pots"


def by_langchain():
    for responses in [False, True]:
        model = langchain_openai.ChatOpenAI(
            model=MODEL, base_url=URL, api_key="none", max_retries=0, use_responses_api=responses, max_tokens=MOST,
            extra_body={"logit_bias": BIAS, "seed": 13},
        )
        said = [SystemMessage("You fire pots."), HumanMessage("Fire it.")]
        for method in ["json_schema", "function_calling"]:
            firing = model.with_structured_output(Firing, method=method).invoke(said)
            assert isinstance(firing, Firing), firing
        raw = model.with_structured_output(Firing, method="json_mode", include_raw=True).invoke(said)
        assert raw["raw"].text.startswith("{"), raw
        pieces = list(model.with_structured_output(Firing).stream(said))
        assert isinstance(pieces[-1], Firing), pieces
        for choice in ["any", "load"]:
            called = model.bind_tools([load, Heat], tool_choice=choice, parallel_tool_calls=False).invoke(said)
            (call,) = called.tool_calls
            assert call["name"] in ("load", "Heat") and called.usage_metadata["output_tokens"] > 10, called
        answer = load.invoke(call)
        assert isinstance(answer, ToolMessage)
        words = model.bind_tools([load]).invoke([*said, called, answer])
        assert isinstance(words, AIMessage)
        streamed = None
        for piece in model.bind_tools([load], tool_choice="any").stream(
            [*said, called, answer, words, HumanMessage("Again.")]
        ):
            streamed = piece if streamed is None else streamed + piece
        assert json.loads(json.dumps(streamed.tool_calls[0]["args"]))["firing"], streamed


async def structured_output_beside_tools():
    """Tools that the model may call, and a schema for what it says else."""
    settings = agents.ModelSettings(max_tokens=MOST, extra_body={"logit_bias": BIAS, "seed": 17})
    for model in [MODEL, agents.OpenAIChatCompletionsModel(MODEL, asynchronous)]:
        agent = agents.Agent(
            name="potter", model=model, tools=[fire, heat], output_type=Firing, model_settings=settings,
        )
        result = await agents.Runner.run(agent, "Fire it.", max_turns=20)
        assert isinstance(result.final_output, Firing), result
    for model in pydantic_models():
        agent = pydantic_ai.Agent(
            model, output_type=pydantic_ai.NativeOutput(Firing),
            model_settings={"max_tokens": MOST, "extra_body": {"logit_bias": BIAS, "seed": 17}},
        )

        @agent.tool_plain
        def heat_to(degrees: int) -> str:
            """Heats a kiln."""
            return "hot"

        result = await agent.run("Fire it.")
        assert isinstance(result.output, Firing), result
    for responses in [False, True]:
        model = langchain_openai.ChatOpenAI(
            model=MODEL, base_url=URL, api_key="none", max_retries=0, use_responses_api=responses, max_tokens=MOST,
            extra_body={"logit_bias": BIAS, "seed": 17},
        )
        answer = model.bind_tools([load], response_format=Firing).invoke("Fire it.")
        assert answer.tool_calls or isinstance(answer.additional_kwargs["parsed"], Firing), answer


a_plain_request()
asyncio.run(by_openai_agents())
asyncio.run(by_pydantic_ai())
by_instructor()
by_langchain()
asyncio.run(structured_output_beside_tools())
packages = ["openai", "openai-agents", "pydantic-ai-slim", "instructor", "langchain-openai"]
print("all is well by " + ", ".join(f"{package} {version(package)}" for package in packages))
