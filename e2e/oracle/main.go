// Command oracle answers, with the allocator of kube-scheduler, what the tests of our allocator ask.
//
// It reads one scene per line on stdin (a cluster and the pods that come to it one after the other)
// and writes one answer per line on stdout, in the same order. What it says about a pod depends on
// nothing but that line: claims that were allocated before are part of it.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Scene is a cluster with the pods that come to it.
type Scene struct {
	Nodes   []*v1.Node                   `json:"nodes"`
	Slices  []*resourceapi.ResourceSlice `json:"slices"`
	Classes []*resourceapi.DeviceClass   `json:"classes"`
	Asks    []Ask                        `json:"asks"`
}

// Ask is a pod with its claims, and what was allocated when it came.
type Ask struct {
	Pod *v1.Pod `json:"pod"`
	// Claims are to be allocated for the pod, together.
	Claims []*resourceapi.ResourceClaim `json:"claims"`
	// Held are claims of the pod that are allocated already.
	Held []*resourceapi.ResourceClaim `json:"held"`
	// Allocated are all claims that are allocated, Held included.
	Allocated []*resourceapi.ResourceClaim `json:"allocated"`
}

// Answer says about each pod of a scene what kube-scheduler could do.
type Answer struct {
	Asks []Verdict `json:"asks"`
}

// Verdict is about one pod.
type Verdict struct {
	// Nodes has every node that the pod itself can be on.
	Nodes map[string]Outcome `json:"nodes"`
	// Selects has every request as "claim/request" or "claim/request/subrequest".
	Selects map[string]Selection `json:"selects"`
}

// Outcome is what the allocator made of one node. Without any field: the claims do not fit there.
type Outcome struct {
	// Allocation has a result for each claim.
	Allocation []resourceapi.AllocationResult `json:"allocation,omitempty"`
	// Error is what the allocator returned, whoever is to blame.
	Error string `json:"error,omitempty"`
	// OutOfTime is set when the limit ended the search: nothing is known.
	OutOfTime bool `json:"outOfTime,omitempty"`
}

// Selection is what the selectors of a class and a request say about every device there is.
type Selection struct {
	// Devices are the selected ones, as "slice/device".
	Devices []string `json:"devices"`
	// Errors are the devices on which an expression failed, or "" if one does not compile.
	Errors []string `json:"errors"`
}

func main() {
	limit := flag.Duration("limit", 2*time.Second, "how long a search on one node may take")
	workers := flag.Int("workers", runtime.NumCPU(), "how many scenes are worked on at once")
	speed := flag.Bool("speed", false, "measure how long claims take instead of answering")
	selectors := flag.Bool("selectors", false, "say what selectors cost instead of answering")
	flag.Parse()
	structured.EnableAllocators("incubating")
	run := func() error { return serve(*limit, *workers) }
	switch {
	case *speed:
		run = measure
	case *selectors:
		run = trySelectors
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "oracle:", err)
		os.Exit(1)
	}
}

// reply is the line for a scene, or why there is none.
type reply struct {
	line []byte
	err  error
}

func serve(limit time.Duration, workers int) error {
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := bufio.NewWriterSize(os.Stdout, 1<<20)
	// A slot per scene in work, in the order of the input.
	pending := make(chan chan reply, max(workers, 1))
	go func() {
		defer close(pending)
		for {
			line, err := in.ReadBytes('\n')
			if len(line) > 0 {
				slot := make(chan reply, 1)
				pending <- slot
				go func() { slot <- answer(line, limit) }()
			}
			if err != nil {
				return
			}
		}
	}()
	for slot := range pending {
		reply := <-slot
		if reply.err != nil {
			return reply.err
		}
		if _, err := out.Write(append(reply.line, '\n')); err != nil {
			return err
		}
		if err := out.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func answer(line []byte, limit time.Duration) reply {
	var scene Scene
	if err := json.Unmarshal(line, &scene); err != nil {
		return reply{err: fmt.Errorf("a scene that cannot be read: %w", err)}
	}
	verdicts, err := judge(&scene, limit)
	if err != nil {
		return reply{err: err}
	}
	written, err := json.Marshal(Answer{Asks: verdicts})
	return reply{line: written, err: err}
}
