package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// features is what a server of the newest minor has on by default.
var features = structured.Features{
	AdminAccess:             true,
	ConsumableCapacity:      true,
	DeviceBindingAndStatus:  true,
	DeviceTaints:            true,
	FractionalCapacityRange: true,
	PartitionableDevices:    true,
	PrioritizedList:         true,
}

// classes is the lister that the allocator wants.
type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, fmt.Errorf("no DeviceClass %q", name)
}

func judge(scene *Scene, limit time.Duration) ([]Verdict, error) {
	cache := cel.NewCache(1000, cel.Features{EnableConsumableCapacity: true})
	verdicts := make([]Verdict, 0, len(scene.Asks))
	for i := range scene.Asks {
		ask := &scene.Asks[i]
		allocator, err := structured.NewAllocator(context.Background(), features, allocatedState(ask.Allocated),
			classes(scene.Classes), scene.Slices, cache)
		if err != nil {
			return nil, err
		}
		verdict := Verdict{Nodes: map[string]Outcome{}, Selects: selections(scene, ask, cache)}
		for _, node := range scene.Nodes {
			possible, err := podFits(ask, node)
			if err != nil {
				return nil, err
			}
			if possible {
				verdict.Nodes[node.Name] = outcome(allocator, node, ask.Claims, limit)
			}
		}
		verdicts = append(verdicts, verdict)
	}
	return verdicts, nil
}

func outcome(allocator structured.Allocator, node *v1.Node, claims []*resourceapi.ResourceClaim, limit time.Duration) Outcome {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	allocation, err := allocator.Allocate(ctx, node, claims)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return Outcome{OutOfTime: true}
	case err != nil:
		return Outcome{Error: err.Error()}
	default:
		return Outcome{Allocation: allocation}
	}
}

// podFits asks what kube-scheduler asks beside the claims that are to be allocated.
func podFits(ask *Ask, node *v1.Node) (bool, error) {
	fits, err := nodeaffinity.GetRequiredNodeAffinity(ask.Pod).Match(node)
	if err != nil || !fits {
		return false, err
	}
	for _, claim := range ask.Held {
		if claim.Status.Allocation.NodeSelector == nil {
			continue
		}
		selector, err := nodeaffinity.NewNodeSelector(claim.Status.Allocation.NodeSelector)
		if err != nil {
			return false, err
		}
		if !selector.Match(node) {
			return false, nil
		}
	}
	return true, nil
}

// allocatedState counts what claims hold: devices, shares, and nothing for admin access.
func allocatedState(claims []*resourceapi.ResourceClaim) structured.AllocatedState {
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, claim := range claims {
		for _, result := range claim.Status.Allocation.Devices.Results {
			if ptr.Deref(result.AdminAccess, false) {
				continue
			}
			id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
			if result.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, result.ShareID))
			if result.ConsumedCapacity != nil {
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, result.ConsumedCapacity))
			}
		}
	}
	return state
}

// selections evaluates every request's selectors on every device, whatever else speaks against it.
func selections(scene *Scene, ask *Ask, cache *cel.Cache) map[string]Selection {
	all := map[string]Selection{}
	for _, claim := range ask.Claims {
		for _, request := range claim.Spec.Devices.Requests {
			name := claim.Name + "/" + request.Name
			if request.Exactly != nil {
				all[name] = selection(scene, request.Exactly.DeviceClassName, request.Exactly.Selectors, cache)
			}
			for _, sub := range request.FirstAvailable {
				all[name+"/"+sub.Name] = selection(scene, sub.DeviceClassName, sub.Selectors, cache)
			}
		}
	}
	return all
}

func selection(scene *Scene, className string, selectors []resourceapi.DeviceSelector, cache *cel.Cache) Selection {
	result := Selection{Devices: []string{}, Errors: []string{}}
	class, err := classes(scene.Classes).Get(className)
	if err != nil {
		return result
	}
	programs := make([]cel.CompilationResult, 0, len(class.Spec.Selectors)+len(selectors))
	for _, list := range [][]resourceapi.DeviceSelector{class.Spec.Selectors, selectors} {
		for _, selector := range list {
			program := cache.GetOrCompile(selector.CEL.Expression)
			if program.Error != nil {
				result.Errors = append(result.Errors, "")
				return result
			}
			programs = append(programs, program)
		}
	}
	for _, slice := range scene.Slices {
		for _, device := range slice.Spec.Devices {
			name := slice.Name + "/" + device.Name
			selected, err := selects(programs, slice.Spec.Driver, &device)
			switch {
			case err != nil:
				result.Errors = append(result.Errors, name)
			case selected:
				result.Devices = append(result.Devices, name)
			}
		}
	}
	return result
}

// selects is the conjunction; a selector that fails after one that says no was never asked.
func selects(programs []cel.CompilationResult, driver string, device *resourceapi.Device) (bool, error) {
	for _, program := range programs {
		matches, _, err := program.DeviceMatches(context.Background(), cel.Device{
			Driver:                   driver,
			AllowMultipleAllocations: device.AllowMultipleAllocations,
			Attributes:               device.Attributes,
			Capacity:                 device.Capacity,
		})
		if err != nil || !matches {
			return false, err
		}
	}
	return true, nil
}
