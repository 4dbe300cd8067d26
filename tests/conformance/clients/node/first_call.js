// The first call of docs/clients.md. `node first_call.js HOST:PORT FOLDER_OF_THE_PROTOS` prints y.
'use strict';
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const definition = protoLoader.loadSync('rapt/v1/attention.proto', {includeDirs: [process.argv[3]], longs: Number});
const {AttentionService} = grpc.loadPackageDefinition(definition).rapt.v1;

// Of one head, [1, 1, rows, 2].
function tensor(...values) {
  return {dtype: 'FP32', shape: [1, 1, values.length / 2, 2], data: Buffer.from(Float32Array.from(values).buffer)};
}

const client = new AttentionService(process.argv[2], grpc.credentials.createInsecure(), {
  'grpc.max_receive_message_length': 256 << 20,
});
const request = {q: tensor(1, 0), k: tensor(1, 0, 1, 0), v: tensor(1, 2, 3, 4)};
client.attend(request, {deadline: Date.now() + 10000}, (error, response) => {
  client.close();
  if (error) throw error;
  const {shape, data} = response.y;
  const y = Array.from({length: data.length / 4}, (_, n) => data.readFloatLE(4 * n));
  console.log(`[${shape.join(' ')}] [${y.join(' ')}]`);
});
