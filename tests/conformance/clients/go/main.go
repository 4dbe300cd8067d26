// grpc-go, driven by tests/conformance/clients_test.py through calls on its standard input, or as `go-client load ...` by
// losses_test.py.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// Passes messages on as bytes.
type bytesCodec struct{}

func (bytesCodec) Name() string                        { return "proto" }
func (bytesCodec) Marshal(message any) ([]byte, error) { return message.([]byte), nil }
func (bytesCodec) Unmarshal(data []byte, into any) error {
	*into.(*[]byte) = append([]byte(nil), data...)
	return nil
}

type command struct {
	kind, method    string
	timeout, cancel time.Duration
	waitForReady    bool
	metadata        metadata.MD
	requests        [][]byte
}

func unary(ctx context.Context, channel *grpc.ClientConn, c command, options ...grpc.CallOption) ([][]byte, error) {
	var response []byte
	err := channel.Invoke(ctx, c.method, c.requests[0], &response, options...)
	if err != nil {
		return nil, err
	}
	return [][]byte{response}, nil
}

func stream(ctx context.Context, channel *grpc.ClientConn, c command, options ...grpc.CallOption) ([][]byte, error) {
	description := grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	call, err := channel.NewStream(ctx, &description, c.method, options...)
	if err != nil {
		return nil, err
	}
	for _, request := range c.requests {
		if err := call.SendMsg(request); err != nil {
			break // RecvMsg() tells why
		}
	}
	call.CloseSend()
	var responses [][]byte
	for {
		var response []byte
		if err := call.RecvMsg(&response); err == io.EOF {
			return responses, nil
		} else if err != nil {
			return responses, err
		}
		responses = append(responses, response)
	}
}

func run(channel *grpc.ClientConn, c command, trailers *metadata.MD) ([][]byte, error) {
	ctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(context.Background(), c.metadata), c.timeout)
	defer cancel()
	if c.cancel > 0 {
		time.AfterFunc(c.cancel, cancel)
	}
	options := []grpc.CallOption{grpc.WaitForReady(c.waitForReady), grpc.Trailer(trailers)}
	if c.kind == "unary" {
		return unary(ctx, channel, c, options...)
	}
	return stream(ctx, channel, c, options...)
}

func milliseconds(text string) time.Duration {
	count, err := strconv.Atoi(text)
	check(err)
	return time.Duration(count) * time.Millisecond
}

func parse(line string) command {
	words := strings.Split(strings.TrimSuffix(line, "\n"), " ")
	c := command{words[0], words[1], milliseconds(words[2]), milliseconds(words[3]), words[4] == "wait", metadata.MD{}, nil}
	for _, line := range strings.Split(string(decode(words[5])), "\n") {
		if name, value, found := strings.Cut(line, " "); found {
			c.metadata.Append(name, value)
		}
	}
	for _, word := range words[6:] {
		c.requests = append(c.requests, decode(word))
	}
	return c
}

func decode(word string) []byte {
	bytes, err := base64.StdEncoding.DecodeString(word)
	check(err)
	return bytes
}

// A line for each name.
func format(trailers metadata.MD) string {
	var lines []string
	for name, values := range trailers {
		lines = append(lines, name+" "+values[0])
	}
	return strings.Join(lines, "\n")
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	if os.Args[1] == "load" {
		runLoad(os.Args[2], os.Args[3], os.Args[4], os.Args[5], os.Args[6])
		return
	}
	channel, err := grpc.NewClient("passthrough:///"+os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(bytesCodec{}), grpc.MaxCallRecvMsgSize(64<<20)))
	check(err)
	input := bufio.NewReader(os.Stdin)
	for {
		line, err := input.ReadString('\n')
		if err == io.EOF {
			return
		}
		check(err)
		var trailers metadata.MD
		responses, err := run(channel, parse(line), &trailers)
		fmt.Print(int(status.Code(err)))
		texts := [][]byte{[]byte(status.Convert(err).Message()), []byte(format(trailers))}
		for _, text := range append(texts, responses...) {
			fmt.Print(" ", base64.StdEncoding.EncodeToString(text))
		}
		fmt.Println()
	}
}
