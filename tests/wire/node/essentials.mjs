// The essentials of the NATS protocol with the Node client `nats`.
//
// node essentials.mjs HOST PORT runs every check below against that server and prints one
// line of JSON per check: {"name": ..., "ok": true} or {"name": ..., "error": ...}.
// The exit code is 0 when all of them ran, whether or not they passed.
import assert from "node:assert/strict";
import { connect, createInbox, Empty, ErrorCode, headers, StringCodec } from "nats";

const [host, port] = process.argv.slice(2);
const servers = `${host}:${port}`;
const patienceMs = 20000;
const text = StringCodec();

/** A connection that is closed when the check is over. */
async function withClients(count, options, check) {
  const clients = [];
  try {
    for (let i = 0; i < count; i++) {
      clients.push(await connect({ servers, reconnect: false, ...options }));
    }
    return await check(...clients);
  } finally {
    await Promise.all(clients.map((c) => c.close()));
  }
}

/** The next `count` messages of a subscription. */
async function take(subscription, count) {
  const messages = [];
  if (count === 0) return messages;
  for await (const message of subscription) {
    messages.push(message);
    if (messages.length === count) break;
  }
  return messages;
}

const range = (n) => Array.from({ length: n }, (_, i) => i);

const checks = {
  async publish_and_subscribe() {
    await withClients(2, {}, async (publisher, subscriber) => {
      const subscription = subscriber.subscribe("node.greet");
      await subscriber.flush();
      for (const i of range(1000)) publisher.publish("node.greet", text.encode(`hello ${i}`));
      const messages = await take(subscription, 1000);
      assert.deepEqual(messages.map((m) => m.string()), range(1000).map((i) => `hello ${i}`));
      assert.equal(messages[0].subject, "node.greet");
      assert.ok(!messages[0].reply);
    });
  },

  async bodies_arrive_as_they_were() {
    await withClients(1, {}, async (nc) => {
      const subscription = nc.subscribe("node.bodies");
      const bodies = [Empty, text.encode("\r\n"), Uint8Array.from(range(256)), text.encode("grüße")];
      bodies.push(new Uint8Array(65537).fill(120), new Uint8Array(nc.info.max_payload).fill(7));
      for (const body of bodies) nc.publish("node.bodies", body);
      const messages = await take(subscription, bodies.length);
      messages.forEach((m, i) => assert.equal(Buffer.compare(m.data, bodies[i]), 0));
      assert.equal(nc.info.max_payload, 1048576);
    });
  },

  async too_large_is_refused() {
    await withClients(1, {}, async (nc) => {
      const body = new Uint8Array(nc.info.max_payload + 1);
      assert.throws(() => nc.publish("node.large", body), { code: ErrorCode.MaxPayloadExceeded });
    });
  },

  async wildcards() {
    await withClients(2, {}, async (publisher, subscriber) => {
      const expected = {
        "node.w.*": ["node.w.a", "node.w.b"],
        "node.w.>": ["node.w.a", "node.w.b", "node.w.a.x", "node.w.b.x"],
        "node.*.*.x": ["node.w.a.x", "node.w.b.x"],
        "node.w.a": ["node.w.a"],
      };
      const subscriptions = Object.keys(expected).map((p) => [p, subscriber.subscribe(p)]);
      await subscriber.flush();
      for (const s of ["node.w", "node.w.a", "node.w.b", "node.w.a.x", "node.w.b.x"]) {
        publisher.publish(s);
      }
      for (const [pattern, subscription] of subscriptions) {
        const messages = await take(subscription, expected[pattern].length);
        assert.deepEqual(messages.map((m) => m.subject), expected[pattern], pattern);
      }
    });
  },

  async queue_groups() {
    await withClients(3, {}, async (publisher, a, b) => {
      const total = 3000;
      const got = [[], [], []];
      let finished;
      const done = new Promise((resolve) => (finished = resolve));
      [a, b, b].forEach((nc, i) => {
        nc.subscribe("node.work.*", {
          queue: "workers",
          callback: (error, message) => {
            assert.equal(error, null);
            got[i].push(Number(message.string()));
            if (got.flat().length === total) finished();
          },
        });
      });
      await a.flush();
      await b.flush();
      for (const i of range(total)) publisher.publish(`node.work.${i % 5}`, text.encode(`${i}`));
      await done;
      await a.flush();
      await b.flush();
      assert.deepEqual(got.flat().sort((x, y) => x - y), range(total));
      for (const member of got) {
        assert.deepEqual(member, [...member].sort((x, y) => x - y));
        assert.ok(member.length > 800 && member.length < 1200, `uneven: ${member.length}`);
      }
    });
  },

  async request_and_reply() {
    await withClients(2, {}, async (requester, responder) => {
      responder.subscribe("node.double", {
        callback: (_, m) => m.respond(text.encode(m.string() + m.string())),
      });
      await responder.flush();
      const answers = await Promise.all(
        range(100).map((i) =>
          requester.request("node.double", text.encode(`${i},`), { timeout: patienceMs })
        ),
      );
      assert.deepEqual(answers.map((m) => m.string()), range(100).map((i) => `${i},${i},`));
      const one = await requester.request("node.double", text.encode("x"), {
        timeout: patienceMs,
        noMux: true,
        reply: createInbox(),
      });
      assert.equal(one.string(), "xx");
    });
  },

  async no_responders() {
    await withClients(1, {}, async (nc) => {
      await assert.rejects(nc.request("node.nobody", Empty, { timeout: patienceMs }), {
        code: ErrorCode.NoResponders,
      });
    });
  },

  async headers() {
    await withClients(2, {}, async (publisher, subscriber) => {
      const subscription = subscriber.subscribe("node.headers");
      await subscriber.flush();
      const h = headers();
      h.append("Trace-Id", "abc");
      h.append("Many", "1");
      h.append("Many", "2");
      publisher.publish("node.headers", text.encode("body"), { headers: h, reply: "node.r" });
      publisher.publish("node.headers", Empty, { headers: h });
      const [full, empty] = await take(subscription, 2);
      for (const message of [full, empty]) {
        assert.equal(message.headers.get("Trace-Id"), "abc");
        assert.deepEqual(message.headers.values("Many"), ["1", "2"]);
      }
      assert.equal(full.string(), "body");
      assert.equal(full.reply, "node.r");
      assert.equal(empty.data.length, 0);
    });
  },

  async drain() {
    await withClients(1, {}, async (publisher) => {
      const subscriber = await connect({ servers, reconnect: false });
      const got = [];
      subscriber.subscribe("node.drain", { callback: (_, m) => got.push(Number(m.string())) });
      await subscriber.flush();
      for (const i of range(500)) publisher.publish("node.drain", text.encode(`${i}`));
      await publisher.flush();
      await subscriber.drain();
      assert.deepEqual(got, range(500));
      assert.ok(subscriber.isClosed());
    });
  },

  async unsubscribe_with_max() {
    await withClients(2, {}, async (publisher, subscriber) => {
      const limited = subscriber.subscribe("node.limited", { max: 5 });
      const everything = subscriber.subscribe("node.limited");
      await subscriber.flush();
      for (const i of range(20)) publisher.publish("node.limited", text.encode(`${i}`));
      assert.equal((await take(everything, 20)).length, 20);
      const messages = [];
      for await (const message of limited) messages.push(message.string());
      assert.deepEqual(messages, range(5).map(String));
    });
  },

  async no_echo() {
    await withClients(1, { noEcho: true }, async (quiet) => {
      await withClients(1, {}, async (other) => {
        const own = quiet.subscribe("node.echo");
        await quiet.flush();
        quiet.publish("node.echo", text.encode("mine"));
        await quiet.flush();
        other.publish("node.echo", text.encode("yours"));
        assert.deepEqual((await take(own, 1)).map((m) => m.string()), ["yours"]);
      });
    });
  },

  async pedantic_and_verbose() {
    await withClients(1, { pedantic: true, verbose: true }, async (nc) => {
      const subscription = nc.subscribe("node.strict");
      nc.publish("node.strict", text.encode("x"));
      assert.deepEqual((await take(subscription, 1)).map((m) => m.string()), ["x"]);
      assert.ok((await nc.rtt()) >= 0);
    });
  },

  async reconnect() {
    const nc = await connect({ servers, reconnectTimeWait: 10 });
    try {
      const subscription = nc.subscribe("node.back");
      await nc.flush();
      const back = (async () => {
        for await (const status of nc.status()) if (status.type === "reconnect") return;
      })();
      await nc.reconnect();
      await back;
      await nc.flush();
      await withClients(1, {}, async (publisher) => {
        publisher.publish("node.back", text.encode("again"));
        assert.deepEqual((await take(subscription, 1)).map((m) => m.string()), ["again"]);
      });
    } finally {
      await nc.close();
    }
  },

  async order_of_many() {
    await withClients(3, {}, async (one, two, subscriber) => {
      const each = 20000;
      const next = { "node.many.1": 0, "node.many.2": 0 };
      let received = 0;
      let finished, failed;
      const done = new Promise((resolve, reject) => ([finished, failed] = [resolve, reject]));
      subscriber.subscribe("node.many.*", {
        callback: (_, m) => {
          const number = Number(m.string());
          if (number !== next[m.subject]++) failed(new Error(`${m.subject}: ${number}`));
          if (++received === 2 * each) finished();
        },
      });
      await subscriber.flush();
      for (let from = 0; from < each; from += 1000) {
        for (let i = from; i < from + 1000; i++) {
          one.publish("node.many.1", text.encode(`${i}`));
          two.publish("node.many.2", text.encode(`${i}`));
        }
        await Promise.all([one.flush(), two.flush()]);
      }
      await done;
      await subscriber.flush();
      assert.equal(received, 2 * each);
    });
  },
};

/** A check that hangs fails instead. */
function bounded(promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("no answer in time")), patienceMs);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

for (const [name, check] of Object.entries(checks)) {
  try {
    await bounded(check());
    console.log(JSON.stringify({ name, ok: true }));
  } catch (error) {
    console.log(JSON.stringify({ name, error: String(error.stack ?? error) }));
  }
}
process.exit(0);
