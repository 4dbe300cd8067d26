// The first call of docs/clients.md: attention over generated stubs. `java FirstCall HOST:PORT` prints y.
import com.google.protobuf.ByteString;
import io.grpc.ManagedChannel;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.util.List;
import java.util.concurrent.TimeUnit;
import rapt.v1.AttendRequest;
import rapt.v1.AttentionServiceGrpc;
import rapt.v1.DataType;
import rapt.v1.Tensor;

public class FirstCall {
  // Of one head, [1, 1, rows, 2].
  private static Tensor tensor(float... values) {
    ByteBuffer data = ByteBuffer.allocate(4 * values.length).order(ByteOrder.LITTLE_ENDIAN);
    for (float value : values) data.putFloat(value);
    return Tensor.newBuilder()
        .setDtype(DataType.FP32)
        .addAllShape(List.of(1L, 1L, values.length / 2L, 2L))
        .setData(ByteString.copyFrom(data.flip()))
        .build();
  }

  public static void main(String[] arguments) {
    ManagedChannel channel =
        NettyChannelBuilder.forTarget(arguments[0])
            .usePlaintext()
            .maxInboundMessageSize(256 << 20)
            .build();
    AttendRequest request =
        AttendRequest.newBuilder()
            .setQ(tensor(1, 0))
            .setK(tensor(1, 0, 1, 0))
            .setV(tensor(1, 2, 3, 4))
            .build();
    Tensor y =
        AttentionServiceGrpc.newBlockingStub(channel)
            .withDeadlineAfter(10, TimeUnit.SECONDS)
            .attend(request)
            .getY();
    channel.shutdownNow();
    FloatBuffer numbers =
        y.getData().asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer();
    StringBuilder text = new StringBuilder();
    while (numbers.hasRemaining()) text.append(' ').append(numbers.get());
    System.out.println(y.getShapeList() + text.toString());
  }
}
