package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
)

// Trial is a device and expressions that are evaluated on it.
type Trial struct {
	Driver      string             `json:"driver"`
	Device      resourceapi.Device `json:"device"`
	Expressions []string           `json:"expressions"`
	// Rounds is how often each expression is timed; 0 stands for once.
	Rounds int `json:"rounds"`
}

// Trialed is what kube-scheduler makes of one expression.
type Trialed struct {
	// Accepted is whether the API server takes the expression from a user today.
	Accepted bool `json:"accepted"`
	// Estimate is the cost in the worst case, which the API server bounds.
	Estimate uint64 `json:"estimate"`
	// Cost is what the evaluation cost on this device.
	Cost uint64 `json:"cost"`
	// Matches is the answer, false where Error is set.
	Matches bool `json:"matches"`
	// Error says why there is no answer.
	Error string `json:"error,omitempty"`
	// CompileNs and EvaluateNs are medians over all rounds.
	CompileNs  int64 `json:"compileNs"`
	EvaluateNs int64 `json:"evaluateNs"`
}

// trySelectors reads a Trial on stdin and writes what becomes of each of its expressions.
func trySelectors() error {
	var trial Trial
	if err := json.NewDecoder(os.Stdin).Decode(&trial); err != nil {
		return fmt.Errorf("a trial that cannot be read: %w", err)
	}
	results := make([]Trialed, 0, len(trial.Expressions))
	for _, expression := range trial.Expressions {
		results = append(results, tryOne(&trial, expression))
	}
	return json.NewEncoder(os.Stdout).Encode(results)
}

func tryOne(trial *Trial, expression string) Trialed {
	compiler := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true})
	checked := compiler.CompileCELExpression(expression, cel.Options{EnvType: ptr.To(environment.NewExpressions)})
	result := Trialed{
		Accepted: checked.Error == nil && checked.MaxCost <= resourceapi.CELSelectorExpressionMaxCost &&
			len(expression) <= resourceapi.CELSelectorExpressionMaxLength,
		Estimate: checked.MaxCost,
	}
	if checked.Error != nil {
		result.Error = checked.Error.Error()
		return result
	}
	device := cel.Device{
		Driver:                   trial.Driver,
		AllowMultipleAllocations: trial.Device.AllowMultipleAllocations,
		Attributes:               trial.Device.Attributes,
		Capacity:                 trial.Device.Capacity,
	}
	var compiling, evaluating []time.Duration
	for range max(trial.Rounds, 1) {
		start := time.Now()
		// As kube-scheduler does it: the API server has estimated the cost before.
		program := compiler.CompileCELExpression(expression, cel.Options{DisableCostEstimation: true})
		compiling = append(compiling, time.Since(start))
		if program.Error != nil {
			result.Error = program.Error.Error()
			return result
		}
		start = time.Now()
		matches, details, err := program.DeviceMatches(context.Background(), device)
		evaluating = append(evaluating, time.Since(start))
		result.Matches, result.Error = matches, ""
		if err != nil {
			result.Error = err.Error()
		}
		if details != nil {
			result.Cost = ptr.Deref(details.ActualCost(), 0)
		}
	}
	result.CompileNs, result.EvaluateNs = median(compiling), median(evaluating)
	return result
}

func median(times []time.Duration) int64 {
	slices.Sort(times)
	return times[len(times)/2].Nanoseconds()
}
