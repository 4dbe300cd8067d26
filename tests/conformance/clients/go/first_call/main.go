// The first call of docs/clients.md: attention over generated stubs. `first-call HOST:PORT` prints y.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	raptv1 "rapt/clients/rapt/v1" // where protoc wrote the stubs
)

// Of one head, [1, 1, rows, 2].
func tensor(values ...float32) *raptv1.Tensor {
	var data bytes.Buffer
	binary.Write(&data, binary.LittleEndian, values)
	return &raptv1.Tensor{
		Dtype: raptv1.DataType_FP32, Shape: []int64{1, 1, int64(len(values) / 2), 2}, Data: data.Bytes()}
}

func main() {
	channel, err := grpc.NewClient(os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(256<<20)))
	if err != nil {
		log.Fatal(err)
	}
	defer channel.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	response, err := raptv1.NewAttentionServiceClient(channel).Attend(ctx, &raptv1.AttendRequest{
		Q: tensor(1, 0), K: tensor(1, 0, 1, 0), V: tensor(1, 2, 3, 4)})
	if err != nil {
		log.Fatal(err)
	}
	y := make([]float32, len(response.Y.Data)/4)
	binary.Read(bytes.NewReader(response.Y.Data), binary.LittleEndian, y)
	fmt.Println(response.Y.Shape, y)
}
