package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// Load is a cluster and claims that are decided on it one by one, each as if the others were not there.
type Load struct {
	Nodes     []*v1.Node                   `json:"nodes"`
	Slices    []*resourceapi.ResourceSlice `json:"slices"`
	Classes   []*resourceapi.DeviceClass   `json:"classes"`
	Allocated []*resourceapi.ResourceClaim `json:"allocated"`
	Claims    []*resourceapi.ResourceClaim `json:"claims"`
}

// measure reads a Load on stdin and writes how long each claim took in nanoseconds: the start of a
// scheduling cycle (a new allocator over all slices) and the search on one node, the first on which the
// claim fits. Searches on nodes before that are left out, as are claims that fit nowhere (-1). What is
// allocated is counted beforehand, as kube-scheduler keeps it from informers.
func measure() error {
	var load Load
	if err := json.NewDecoder(os.Stdin).Decode(&load); err != nil {
		return fmt.Errorf("a load that cannot be read: %w", err)
	}
	cache := cel.NewCache(1000, cel.Features{EnableConsumableCapacity: true})
	state := allocatedState(load.Allocated)
	times := make([]int64, 0, len(load.Claims))
	for _, claim := range load.Claims {
		taken, err := cycle(&load, claim, state, cache)
		if err != nil {
			return err
		}
		times = append(times, taken)
	}
	return json.NewEncoder(os.Stdout).Encode(times)
}

func cycle(load *Load, claim *resourceapi.ResourceClaim, state structured.AllocatedState, cache *cel.Cache) (int64, error) {
	ctx := context.Background()
	start := time.Now()
	allocator, err := structured.NewAllocator(ctx, features, state, classes(load.Classes), load.Slices, cache)
	if err != nil {
		return 0, err
	}
	prepared := time.Since(start)
	for _, node := range load.Nodes {
		start = time.Now()
		allocation, err := allocator.Allocate(ctx, node, []*resourceapi.ResourceClaim{claim})
		if err != nil {
			return 0, err
		}
		if allocation != nil {
			return (prepared + time.Since(start)).Nanoseconds(), nil
		}
	}
	return -1, nil
}
