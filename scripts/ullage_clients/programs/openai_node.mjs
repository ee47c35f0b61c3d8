// OpenAI's SDK for Node: chats, completions, responses and errors.

import OpenAI from "openai";
import { CITY, LONG, MODEL, PAINT, expect, isCity, isPaint, run, thrown } from "./checks.mjs";

const client = new OpenAI();
const chats = client.chat.completions;
const TOOL = {
  type: "function",
  function: { name: "weather", description: "Weather of a city", parameters: CITY },
};
const NAMED = { type: "function", function: { name: "weather" } };
const QUESTION = { role: "user", content: "What is the weather in Paris?" };
const ASK = { model: MODEL, messages: [QUESTION] };

await run({
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    expect(names.includes(MODEL), names);
    return (await client.models.retrieve(MODEL)).id;
  },

  async create() {
    const answer = await chats.create({ ...ASK, max_tokens: 8 });
    const [choice] = answer.choices;
    expect(choice.message.content && ["stop", "length"].includes(choice.finish_reason), answer);
    const { usage } = answer;
    expect(usage.completion_tokens >= 1 && usage.completion_tokens <= 8, usage);
    expect(usage.total_tokens === usage.prompt_tokens + usage.completion_tokens, usage);
    return `${choice.finish_reason}, ${usage.completion_tokens} tokens`;
  },

  async stream() {
    const options = { stream: true, stream_options: { include_usage: true } };
    const pieces = [];
    for await (const piece of await chats.create({ ...ASK, max_tokens: 8, ...options })) {
      pieces.push(piece);
    }
    const texts = pieces.filter((piece) => piece.choices[0]?.delta.content);
    const reasons = pieces.flatMap((piece) => piece.choices).map((choice) => choice.finish_reason);
    expect(texts.length && ["stop", "length"].includes(reasons.at(-1)), pieces);
    expect(pieces.at(-1).usage && !pieces.at(-1).choices.length, pieces.at(-1));
    return `${texts.length} pieces, ${pieces.at(-1).usage.completion_tokens} tokens`;
  },

  async "forced tool"() {
    const answer = await chats.create({
      ...ASK,
      tools: [TOOL],
      tool_choice: NAMED,
      max_tokens: 64,
    });
    const [call] = answer.choices[0].message.tool_calls;
    expect(call.id && call.function.name === "weather", call);
    expect(isCity(JSON.parse(call.function.arguments)), call);
    return call.function.arguments;
  },

  async "auto tool"() {
    const answer = await chats.create({ ...ASK, tools: [TOOL], max_tokens: 32 });
    const [choice] = answer.choices;
    const isCall = Boolean(choice.message.tool_calls?.length);
    const reasons = isCall ? ["tool_calls", "length"] : ["stop", "length"];
    expect(reasons.includes(choice.finish_reason), choice);
    expect(isCall || choice.message.content, choice);
    return isCall ? "a call" : "text";
  },

  async "tool result"() {
    const call = { name: "weather", arguments: '{"city": "Paris"}' };
    const messages = [
      QUESTION,
      {
        role: "assistant",
        content: null,
        tool_calls: [{ id: "call_1", type: "function", function: call }],
      },
      { role: "tool", tool_call_id: "call_1", content: "sunny" },
    ];
    const answer = await chats.create({
      model: MODEL,
      messages,
      tools: [TOOL],
      tool_choice: "none",
      max_tokens: 8,
    });
    const { message } = answer.choices[0];
    expect(message.content && !message.tool_calls?.length, answer);
    return answer.choices[0].finish_reason;
  },

  async "JSON schema"() {
    const answer = await chats.parse({
      ...ASK,
      response_format: { type: "json_schema", json_schema: { name: "paint", schema: PAINT } },
      max_tokens: 64,
    });
    const { content } = answer.choices[0].message;
    expect(isPaint(JSON.parse(content)), answer);
    return content;
  },

  async choices() {
    const answer = await chats.create({ ...ASK, n: 2, temperature: 1, max_tokens: 4 });
    expect(answer.choices.map((choice) => choice.index).join() === "0,1", answer);
    return `${answer.choices.length} choices`;
  },

  async logprobs() {
    const answer = await chats.create({
      ...ASK,
      logprobs: true,
      top_logprobs: 2,
      max_tokens: 3,
    });
    const tokens = answer.choices[0].logprobs.content;
    expect(tokens.length === answer.usage.completion_tokens, tokens);
    expect(tokens.every((token) => token.logprob <= 0 && token.top_logprobs.length === 2), tokens);
    return `${tokens.length} tokens`;
  },

  async completions() {
    const answer = await client.completions.create({
      model: MODEL,
      prompt: "The sky is",
      max_tokens: 4,
    });
    expect(answer.choices[0].text, answer);
    return answer.choices[0].finish_reason;
  },

  async responses() {
    const answer = await client.responses.create({
      model: MODEL,
      instructions: "Be brief.",
      input: "Hello",
      max_output_tokens: 8,
      store: false,
    });
    expect(["completed", "incomplete"].includes(answer.status) && answer.output_text, answer);
    return `${answer.status}, ${answer.usage.output_tokens} tokens`;
  },

  async "responses stream"() {
    const kinds = [];
    const stream = await client.responses.create({
      model: MODEL,
      input: "Hello",
      max_output_tokens: 8,
      stream: true,
    });
    for await (const event of stream) kinds.push(event.type);
    expect(kinds[0] === "response.created", kinds);
    expect(["response.completed", "response.incomplete"].includes(kinds.at(-1)), kinds);
    expect(kinds.includes("response.output_text.delta"), kinds);
    return `${kinds.length} events, ${kinds.at(-1)}`;
  },

  async "responses tool"() {
    const answer = await client.responses.create({
      model: MODEL,
      input: "Hello",
      tools: [{ type: "function", name: "weather", parameters: CITY, strict: true }],
      tool_choice: "required",
      max_output_tokens: 64,
    });
    const call = answer.output.find((item) => item.type === "function_call");
    expect(call?.name === "weather" && isCity(JSON.parse(call.arguments)), answer);
    return call.arguments;
  },

  async "wrong model"() {
    const work = () => chats.create({ ...ASK, model: "absent" });
    const error = await thrown(OpenAI.NotFoundError, work);
    expect(error.code === "model_not_found", error.code);
    return `NotFoundError, ${error.code}`;
  },

  async "long prompt"() {
    const messages = [{ role: "user", content: LONG }];
    const work = () => chats.create({ model: MODEL, messages });
    const error = await thrown(OpenAI.BadRequestError, work);
    expect(error.code === "context_length_exceeded", error.code);
    return `BadRequestError, ${error.code}`;
  },

  async embeddings() {
    const work = () => client.embeddings.create({ model: MODEL, input: "Hello" });
    const error = await thrown(OpenAI.BadRequestError, work);
    expect(error.code === "WRONG_TASK", error.code);
    return `BadRequestError, ${error.code}`;
  },
});
