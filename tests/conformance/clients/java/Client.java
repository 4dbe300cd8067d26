// grpc-java over Netty, driven by tests/conformance/clients_test.py through calls on its standard input.
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;

public class Client {
  // Passes messages on as bytes.
  static final MethodDescriptor.Marshaller<byte[]> BYTES =
      new MethodDescriptor.Marshaller<>() {
        @Override
        public InputStream stream(byte[] message) {
          return new ByteArrayInputStream(message);
        }

        @Override
        public byte[] parse(InputStream stream) {
          try {
            return stream.readAllBytes();
          } catch (IOException e) {
            throw new UncheckedIOException(e);
          }
        }
      };

  // Writes the responses as they come, and ends with the status.
  private static class Listener extends ClientCall.Listener<byte[]> {
    final StringBuilder responses = new StringBuilder();
    final BlockingQueue<Status> status = new LinkedBlockingQueue<>();
    volatile Metadata trailers = new Metadata();

    @Override
    public void onMessage(byte[] message) {
      responses.append(' ').append(Base64.getEncoder().encodeToString(message));
    }

    @Override
    public void onClose(Status closed, Metadata trailers) {
      this.trailers = trailers;
      status.add(closed);
    }
  }

  private static byte[] decode(String word) {
    return Base64.getDecoder().decode(word);
  }

  private static String encode(String text) {
    return Base64.getEncoder().encodeToString(text.getBytes(StandardCharsets.UTF_8));
  }

  // A line for each name.
  private static Metadata parse(String lines) {
    Metadata metadata = new Metadata();
    for (String line : lines.lines().toList()) {
      String[] words = line.split(" ", 2);
      if (words[0].endsWith(Metadata.BINARY_HEADER_SUFFIX)) {
        metadata.put(
            Metadata.Key.of(words[0], Metadata.BINARY_BYTE_MARSHALLER),
            words[1].getBytes(StandardCharsets.UTF_8));
      } else {
        metadata.put(Metadata.Key.of(words[0], Metadata.ASCII_STRING_MARSHALLER), words[1]);
      }
    }
    return metadata;
  }

  private static String format(Metadata metadata) {
    return metadata.keys().stream()
        .filter(name -> !name.endsWith(Metadata.BINARY_HEADER_SUFFIX))
        .map(
            name ->
                name + " " + metadata.get(Metadata.Key.of(name, Metadata.ASCII_STRING_MARSHALLER)))
        .collect(Collectors.joining("\n"));
  }

  private static String run(ManagedChannel channel, String[] words) throws InterruptedException {
    MethodDescriptor<byte[], byte[]> method =
        MethodDescriptor.<byte[], byte[]>newBuilder(BYTES, BYTES)
            .setType(
                words[0].equals("unary")
                    ? MethodDescriptor.MethodType.UNARY
                    : MethodDescriptor.MethodType.BIDI_STREAMING)
            .setFullMethodName(words[1].substring(1))
            .build();
    CallOptions options =
        CallOptions.DEFAULT.withDeadlineAfter(Long.parseLong(words[2]), TimeUnit.MILLISECONDS);
    if (words[4].equals("wait")) options = options.withWaitForReady();
    ClientCall<byte[], byte[]> call = channel.newCall(method, options);
    Listener listener = new Listener();
    call.start(listener, parse(new String(decode(words[5]), StandardCharsets.UTF_8)));
    call.request(1000);
    for (int i = 6; i < words.length; ++i) call.sendMessage(decode(words[i]));
    call.halfClose();
    long cancel = Long.parseLong(words[3]);
    Status status = cancel > 0 ? listener.status.poll(cancel, TimeUnit.MILLISECONDS) : null;
    if (cancel > 0 && status == null) call.cancel("the test cancels", null);
    if (status == null) status = listener.status.take();
    String message = status.getDescription() == null ? "" : status.getDescription();
    return status.getCode().value()
        + " "
        + encode(message)
        + " "
        + encode(format(listener.trailers))
        + listener.responses;
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel =
        NettyChannelBuilder.forTarget("dns:///" + arguments[0])
            .usePlaintext()
            .proxyDetector(address -> null)
            .keepAliveTime(10, TimeUnit.SECONDS)
            .maxInboundMessageSize(64 << 20)
            .build();
    BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
    for (String line = input.readLine(); line != null; line = input.readLine()) {
      System.out.println(run(channel, line.split(" ", -1)));
    }
    channel.shutdownNow();
  }
}
