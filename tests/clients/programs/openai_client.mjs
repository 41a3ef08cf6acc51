// The openai npm package against the daemon: node openai_client.mjs URL KEY.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];

const models = [];
for await (const model of client.models.list()) models.push(model.id);
assert.deepEqual(models, ["sim"]);

const answer = await client.chat.completions.create({ model: "sim", messages });
assert.equal(answer.choices[0].message.content, "Hello there!");
assert.equal(answer.usage.completion_tokens, 13);

const stream = await client.chat.completions.create({
  model: "sim", messages, stream: true, stream_options: { include_usage: true },
});
let text = "", usage;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, "Hello there!");
assert.equal(usage.completion_tokens, 13);

const completion = await client.completions.create({ model: "sim", prompt: "a", max_tokens: 4.0 });
assert.equal(completion.usage.completion_tokens, 4);

const parameters = {
  type: "object",
  properties: { city: { enum: ["Berlin", "Paris"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const called = await client.chat.completions.create({
  model: "sim", messages, tools, tool_choice: "required", parallel_tool_calls: false,
});
assert.equal(called.choices[0].finish_reason, "tool_calls");
const { name, arguments: given } = called.choices[0].message.tool_calls[0].function;
assert.equal(name, "get_weather");
assert.ok(["Berlin", "Paris"].includes(JSON.parse(given).city));

const shaped = await client.chat.completions.create({
  model: "sim",
  messages,
  response_format: { type: "json_schema", json_schema: { name: "place", schema: parameters } },
});
assert.ok(["Berlin", "Paris"].includes(JSON.parse(shaped.choices[0].message.content).city));

await assert.rejects(
  client.chat.completions.create({ model: "sim", messages, temperature: 3 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
await assert.rejects(
  new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list(),
  (error) => error instanceof OpenAI.AuthenticationError && error.code === "invalid_api_key",
);
