// OpenAI's Node client, one scenario a run: `node client.mjs BASE_URL SCENARIO [OPTIONS]`.
// OPTIONS are a JSON object for the client. Prints one JSON object, `{"error": {...}}` if the client threw.
import OpenAI from "openai";

const [baseURL, scenario, options] = process.argv.slice(2);
const client = new OpenAI({
  baseURL,
  apiKey: "sk-test",
  maxRetries: 0,
  timeout: 30_000,
  ...JSON.parse(options ?? "{}"),
});
const model = "chat-model";
const messages = [{ role: "user", content: "Say hello." }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const scenarios = {
  async whole() {
    return await client.chat.completions.create({ model, messages, max_tokens: 8 });
  },

  async stream() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 16, stream: true });
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    return { chunks };
  },

  async usage() {
    const stream = await client.chat.completions.create({
      model,
      messages,
      max_tokens: 8,
      stream: true,
      stream_options: { include_usage: true },
    });
    let last;
    for await (const chunk of stream) last = chunk;
    return last;
  },

  async tools() {
    const request = { model, messages, tools, tool_choice: "required" };
    const whole = await client.chat.completions.create(request);
    let streamed = "";
    for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
      for (const call of chunk.choices[0]?.delta.tool_calls ?? []) streamed += call.function?.arguments ?? "";
    }
    return { whole: whole.choices[0].message.tool_calls, streamed };
  },

  async headers() {
    const { data, response } = await client.chat.completions
      .create({ model, messages, max_tokens: 4 }, { headers: { "x-request-id": "node-1" } })
      .withResponse();
    return { status: response.status, headers: Object.fromEntries(response.headers), id: data.id };
  },

  async unknownModel() {
    return await client.chat.completions.create({ model: "nobody", messages });
  },

  async badRequest() {
    return await client.chat.completions.create({ model, messages: "no list" });
  },

  async retried() {
    const started = performance.now();
    await client.chat.completions.create({ model, messages, max_tokens: 4 });
    return { ms: performance.now() - started };
  },

  // Leaves a stream after its third chunk, and stays alive so that the connection is closed by nothing else.
  async leave() {
    const stream = await client.chat.completions.create({
      model,
      messages,
      max_tokens: 100_000,
      stream: true,
      ignore_eos: true,
    });
    let count = 0;
    for await (const _ of stream) {
      count += 1;
      if (count === 3) break;
    }
    console.log(JSON.stringify({ count }));
    await new Promise((resolve) => process.stdin.once("data", resolve));
    process.exit(0);
  },
};

try {
  console.log(JSON.stringify(await scenarios[scenario]()));
} catch (error) {
  const { name, status, code, type, message, requestID } = error;
  const kind = error.constructor.name;
  console.log(JSON.stringify({ error: { kind, name, status, code, type, message, requestID } }));
}
