// grpc-go, driven by tests/conformance/clients_test.py through calls on its standard input.
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
	requests        [][]byte
}

func unary(ctx context.Context, channel *grpc.ClientConn, c command) ([][]byte, error) {
	var response []byte
	err := channel.Invoke(ctx, c.method, c.requests[0], &response, grpc.WaitForReady(c.waitForReady))
	if err != nil {
		return nil, err
	}
	return [][]byte{response}, nil
}

func stream(ctx context.Context, channel *grpc.ClientConn, c command) ([][]byte, error) {
	description := grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	call, err := channel.NewStream(ctx, &description, c.method, grpc.WaitForReady(c.waitForReady))
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

func run(channel *grpc.ClientConn, c command) ([][]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	defer cancel()
	if c.cancel > 0 {
		time.AfterFunc(c.cancel, cancel)
	}
	if c.kind == "unary" {
		return unary(ctx, channel, c)
	}
	return stream(ctx, channel, c)
}

func milliseconds(text string) time.Duration {
	count, err := strconv.Atoi(text)
	check(err)
	return time.Duration(count) * time.Millisecond
}

func parse(line string) command {
	words := strings.Split(strings.TrimSuffix(line, "\n"), " ")
	c := command{words[0], words[1], milliseconds(words[2]), milliseconds(words[3]), words[4] == "wait", nil}
	for _, word := range words[5:] {
		request, err := base64.StdEncoding.DecodeString(word)
		check(err)
		c.requests = append(c.requests, request)
	}
	return c
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
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
		responses, err := run(channel, parse(line))
		fmt.Printf("%d %s", status.Code(err), base64.StdEncoding.EncodeToString([]byte(status.Convert(err).Message())))
		for _, response := range responses {
			fmt.Printf(" %s", base64.StdEncoding.EncodeToString(response))
		}
		fmt.Println()
	}
}
