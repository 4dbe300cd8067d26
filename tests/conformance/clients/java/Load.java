// Callers that repeat one call through grpc-java, each on a channel of its own, until standard input ends; writes a
// report for each of its lines after the first, which is the request. Driven by tests/conformance/losses_test.py.
import com.google.gson.Gson;
import io.grpc.CallOptions;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCalls;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.TimeUnit;

public class Load {
  private static class Report {
    int ok;
    Map<String, Integer> lost = new HashMap<>();
    double slowest; // s, of the calls since the last report
  }

  private final MethodDescriptor<byte[], byte[]> method;
  private final byte[] request;
  private final long timeoutSeconds;
  private final Report report = new Report();

  private Load(String method, byte[] request, long timeoutSeconds) {
    this.method =
        MethodDescriptor.<byte[], byte[]>newBuilder(Client.BYTES, Client.BYTES)
            .setType(MethodDescriptor.MethodType.UNARY)
            .setFullMethodName(method.substring(1))
            .build();
    this.request = request;
    this.timeoutSeconds = timeoutSeconds;
  }

  private static ManagedChannel connect(String target, String config) {
    @SuppressWarnings("unchecked")
    Map<String, ?> map = new Gson().fromJson(config, Map.class);
    NettyChannelBuilder builder = NettyChannelBuilder.forTarget(target);
    builder.defaultServiceConfig(map).enableRetry();
    builder.keepAliveTime(10, TimeUnit.SECONDS).keepAliveTimeout(1, TimeUnit.SECONDS);
    return builder.usePlaintext().proxyDetector(address -> null).build();
  }

  private synchronized void count(Status status, double seconds) {
    if (status.isOk()) {
      ++report.ok;
    } else {
      report.lost.merge(status.getCode() + ": " + status.getDescription(), 1, Integer::sum);
    }
    report.slowest = Math.max(report.slowest, seconds);
  }

  private synchronized String takeReport() {
    String line = new Gson().toJson(report);
    report.slowest = 0;
    return line;
  }

  private void repeat(ManagedChannel channel) {
    while (true) {
      long begin = System.nanoTime();
      CallOptions options =
          CallOptions.DEFAULT.withDeadlineAfter(timeoutSeconds, TimeUnit.SECONDS);
      Status status = Status.OK;
      try {
        ClientCalls.blockingUnaryCall(channel, method, options, request);
      } catch (StatusRuntimeException e) {
        status = e.getStatus();
      }
      count(status, (System.nanoTime() - begin) * 1e-9);
    }
  }

  public static void main(String[] arguments) throws Exception {
    BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
    byte[] request = Base64.getDecoder().decode(input.readLine());
    Load load = new Load(arguments[2], request, Long.parseLong(arguments[4]));
    for (int i = Integer.parseInt(arguments[3]); i > 0; --i) {
      ManagedChannel channel = connect(arguments[0], arguments[1]);
      Thread thread = new Thread(() -> load.repeat(channel));
      thread.setDaemon(true);
      thread.start();
    }
    while (input.readLine() != null) System.out.println(load.takeReport());
    System.exit(0);
  }
}
