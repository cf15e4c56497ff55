package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const (
	driverName = "smoke.aliquot.dev"
	cdiKind    = driverName + "/claim"
	devices    = 4
)

// smokeDriver gives each claim one CDI device whose only edit is an environment
// variable with the names of the allocated devices.
type smokeDriver struct {
	cdiDir string
}

// driver serves the kubelet until the context ends. It runs in a pod: node name
// and directories come from the environment.
func driver(ctx context.Context) error {
	node, cdiDir, plugins, registry := os.Getenv("NODE_NAME"), os.Getenv("CDI_DIR"), os.Getenv("PLUGIN_DIR"), os.Getenv("REGISTRAR_DIR")
	for name, value := range map[string]string{"NODE_NAME": node, "CDI_DIR": cdiDir, "PLUGIN_DIR": plugins, "REGISTRAR_DIR": registry} {
		if value == "" {
			return fmt.Errorf("%s is not set", name)
		}
	}
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	data := filepath.Join(plugins, driverName)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return err
	}
	helper, err := kubeletplugin.Start(ctx, &smokeDriver{cdiDir: cdiDir},
		kubeletplugin.DriverName(driverName), kubeletplugin.NodeName(node), kubeletplugin.KubeClient(client),
		kubeletplugin.PluginDataDirectoryPath(data), kubeletplugin.RegistrarDirectoryPath(registry),
		kubeletplugin.HealthService(false))
	if err != nil {
		return err
	}
	defer helper.Stop()

	var published []resourcev1.Device
	for i := range devices {
		published = append(published, resourcev1.Device{Name: fmt.Sprintf("device-%d", i)})
	}
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: published}}}
	if err := helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: pool}}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (d *smokeDriver) specPath(claim types.UID) string {
	return filepath.Join(d.cdiDir, driverName+"-"+string(claim)+".json")
}

func (d *smokeDriver) PrepareResourceClaims(_ context.Context, claims []*resourcev1.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		results[claim.UID] = d.prepare(claim)
	}
	return results, nil
}

func (d *smokeDriver) prepare(claim *resourcev1.ResourceClaim) kubeletplugin.PrepareResult {
	var result kubeletplugin.PrepareResult
	var env []string
	for _, allocated := range claim.Status.Allocation.Devices.Results {
		if allocated.Driver != driverName {
			continue
		}
		env = append(env, "SMOKE_DEVICE="+allocated.Device)
		result.Devices = append(result.Devices, kubeletplugin.Device{
			Requests: []string{allocated.Request}, PoolName: allocated.Pool, DeviceName: allocated.Device,
			CDIDeviceIDs: []string{cdiKind + "=" + string(claim.UID)},
		})
	}
	spec := map[string]any{
		"cdiVersion": "0.5.0", "kind": cdiKind,
		"devices": []any{map[string]any{"name": claim.UID, "containerEdits": map[string]any{"env": env}}},
	}
	content, err := json.Marshal(spec)
	if err == nil {
		// Runtimes read every file of the directory at any time: rename, never write.
		temporary := d.specPath(claim.UID) + ".tmp"
		if err = os.WriteFile(temporary, content, 0o644); err == nil {
			err = os.Rename(temporary, d.specPath(claim.UID))
		}
	}
	if err != nil {
		return kubeletplugin.PrepareResult{Err: err}
	}
	return result
}

func (d *smokeDriver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	for _, claim := range claims {
		err := os.Remove(d.specPath(claim.UID))
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		results[claim.UID] = err
	}
	return results, nil
}

func (d *smokeDriver) HandleError(_ context.Context, err error, msg string) {
	fmt.Fprintf(os.Stderr, "smoke-agent: %s: %v\n", msg, err)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		os.Exit(1)
	}
}

func (d *smokeDriver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}
