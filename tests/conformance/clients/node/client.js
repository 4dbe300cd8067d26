// @grpc/grpc-js, driven by tests/conformance/clients_test.py through calls on its standard input.
'use strict';
const grpc = require('@grpc/grpc-js');
const readline = require('readline');

const client = new grpc.Client(process.argv[2], grpc.credentials.createInsecure(), {
  'grpc.max_receive_message_length': 64 << 20,
  'grpc.max_send_message_length': 64 << 20,
  'grpc.keepalive_time_ms': 10000,
  'grpc.enable_http_proxy': 0,
});
const asIs = (bytes) => bytes;

function begin(kind, method, requests, metadata, options, responses) {
  if (kind === 'unary') {
    return client.makeUnaryRequest(method, asIs, asIs, requests[0], metadata, options, (error, response) => {
      if (!error) responses.push(response);
    });
  }
  const call = client.makeBidiStreamRequest(method, asIs, asIs, metadata, options);
  call.on('data', (response) => responses.push(response));
  call.on('error', () => {});  // 'status' tells it
  for (const request of requests) call.write(request);
  call.end();
  return call;
}

function metadataOf(text, options) {
  const metadata = new grpc.Metadata(options);
  for (const line of text.split('\n').filter(Boolean)) {
    const [name, value] = line.split(' ');
    metadata.set(name, name.endsWith('-bin') ? Buffer.from(value) : value);
  }
  return metadata;
}

function run(line) {
  const [kind, method, timeout, cancel, wait, ...words] = line.split(' ');
  const [names, ...requests] = words.map((word) => Buffer.from(word, 'base64'));
  const metadata = metadataOf(names.toString(), {waitForReady: wait === 'wait'});
  const responses = [];
  return new Promise((resolve) => {
    const call = begin(kind, method, requests, metadata, {deadline: Date.now() + Number(timeout)}, responses);
    if (Number(cancel) > 0) setTimeout(() => call.cancel(), Number(cancel));
    // The last response of a unary call is passed on after its status.
    call.on('status', (status) => setImmediate(() => resolve([status, responses])));
  });
}

async function main() {
  for await (const line of readline.createInterface({input: process.stdin})) {
    const [status, responses] = await run(line);
    const message = status.code === 0 ? '' : status.details;
    const trailers = Object.entries(status.metadata.getMap()).map(([name, value]) => `${name} ${value}`);
    const all = [Buffer.from(message), Buffer.from(trailers.join('\n')), ...responses];
    const texts = all.map((bytes) => bytes.toString('base64'));
    process.stdout.write([status.code, ...texts].join(' ') + '\n');
  }
  client.close();
}

main();
