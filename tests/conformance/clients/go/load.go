package main

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

type report struct {
	OK      int            `json:"ok"`
	Lost    map[string]int `json:"lost"`
	Slowest float64        `json:"slowest"` // s, of the calls since the last report
}

// Callers that repeat one call, each on a channel of its own.
type load struct {
	method  string
	request []byte
	timeout time.Duration

	mutex  sync.Mutex
	counts report
}

func connect(target, config string) *grpc.ClientConn {
	channel, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithDefaultServiceConfig(config),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: time.Second}),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(bytesCodec{})))
	check(err)
	return channel
}

func (l *load) count(err error, took time.Duration) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if err == nil {
		l.counts.OK++
	} else {
		l.counts.Lost[status.Code(err).String()+": "+status.Convert(err).Message()]++
	}
	l.counts.Slowest = max(l.counts.Slowest, took.Seconds())
}

func max(a, b float64) float64 {
	if a > b {
		return a
	}
	return b
}

func (l *load) repeat(channel *grpc.ClientConn) {
	for {
		begin := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), l.timeout)
		var response []byte
		err := channel.Invoke(ctx, l.method, l.request, &response)
		cancel()
		l.count(err, time.Since(begin))
	}
}

func (l *load) report() []byte {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	line, err := json.Marshal(l.counts)
	check(err)
	l.counts.Slowest = 0
	return append(line, '\n')
}

// Calls until standard input ends; writes a report for each of its lines after the first, which is the request.
func runLoad(target, config, method, callers, timeout string) {
	input := bufio.NewReader(os.Stdin)
	request, err := input.ReadString('\n')
	check(err)
	seconds, err := strconv.Atoi(timeout)
	check(err)
	count, err := strconv.Atoi(callers)
	check(err)
	l := &load{
		method:  method,
		request: decode(strings.TrimSpace(request)),
		timeout: time.Duration(seconds) * time.Second,
		counts:  report{Lost: map[string]int{}},
	}
	for i := 0; i < count; i++ {
		go l.repeat(connect(target, config))
	}
	for {
		if _, err := input.ReadString('\n'); err != nil {
			return
		}
		_, err := os.Stdout.Write(l.report())
		check(err)
	}
}
