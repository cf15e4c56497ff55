// Command smoke-agent is what the smoke test runs in pods: the least DRA driver
// that shows that claims become CDI devices, and the least admission webhook
// that shows that the API server reaches a service.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	command := ""
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	var err error
	switch command {
	case "driver":
		err = driver(ctx)
	case "webhook":
		err = webhook(ctx)
	default:
		err = fmt.Errorf("usage: smoke-agent driver|webhook")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "smoke-agent: error:", err)
		os.Exit(1)
	}
}
