// Command fake-nodes creates Node objects without machines, for measuring
// schedulers: Ready, with room for pods, and with no kubelet behind them. Pods
// bound to them stay Pending for ever.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	fakeLabel     = "aliquot.dev/fake-node"
	notReadyTaint = "node.kubernetes.io/not-ready"
	workers       = 16
)

type options struct {
	count             int
	prefix            string
	cpu, memory, pods string
	labels            map[string]string
	remove            bool
	timeout           time.Duration
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return
		}
		fmt.Fprintln(os.Stderr, "fake-nodes: error:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	o := options{labels: map[string]string{}}
	flags := flag.NewFlagSet("fake-nodes", flag.ContinueOnError)
	kubeconfig := flags.String("kubeconfig", os.Getenv("KUBECONFIG"), "kubeconfig `file` (default $KUBECONFIG)")
	flags.IntVar(&o.count, "count", 0, "how many nodes there shall be, named PREFIX-0000 and so on; existing ones stay")
	flags.StringVar(&o.prefix, "prefix", "fake", "start of the nodes' names")
	flags.StringVar(&o.cpu, "cpu", "192", "CPUs of a node")
	flags.StringVar(&o.memory, "memory", "2Ti", "memory of a node")
	flags.StringVar(&o.pods, "pods", "250", "pods of a node")
	flags.BoolVar(&o.remove, "delete", false, "delete every fake node with the prefix instead")
	flags.DurationVar(&o.timeout, "timeout", 5*time.Minute, "give up after this `time`")
	flags.Func("label", "`NAME=VALUE` on every node (repeatable)", func(pair string) error {
		name, value, found := strings.Cut(pair, "=")
		if !found || name == "" {
			return errors.New("must be NAME=VALUE")
		}
		o.labels[name] = value
		return nil
	})
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if !o.remove && o.count <= 0 {
		return errors.New("--count must be at least 1 (or give --delete)")
	}
	if *kubeconfig == "" {
		return errors.New("no kubeconfig: set KUBECONFIG or give --kubeconfig")
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", *kubeconfig, err)
	}
	config.QPS, config.Burst = 500, 1000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", *kubeconfig, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), o.timeout)
	defer cancel()
	if o.remove {
		return remove(ctx, client, o.prefix)
	}
	return create(ctx, client, o)
}

func create(ctx context.Context, client kubernetes.Interface, o options) error {
	capacity := corev1.ResourceList{}
	for name, value := range map[corev1.ResourceName]string{
		corev1.ResourceCPU: o.cpu, corev1.ResourceMemory: o.memory, corev1.ResourcePods: o.pods,
	} {
		quantity, err := resource.ParseQuantity(value)
		if err != nil {
			return fmt.Errorf("--%s %s: %w", name, value, err)
		}
		capacity[name] = quantity
	}
	start := time.Now()
	err := parallel(o.count, func(i int) error {
		name := fmt.Sprintf("%s-%04d", o.prefix, i)
		if err := createOne(ctx, client, name, o.labels, capacity); err != nil {
			return fmt.Errorf("node %s: %w", name, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "fake-nodes: %d nodes Ready and schedulable in %.1fs\n", o.count, time.Since(start).Seconds())
	return nil
}

func createOne(ctx context.Context, client kubernetes.Interface, name string, labels map[string]string, capacity corev1.ResourceList) error {
	all := map[string]string{
		fakeLabel: "true", corev1.LabelHostname: name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
	}
	for label, value := range labels {
		all[label] = value
	}
	nodes := client.CoreV1().Nodes()
	_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: all}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	for {
		node, err := nodes.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if node.Labels[fakeLabel] != "true" {
			return fmt.Errorf("exists and is not a fake node")
		}
		if !ready(node) {
			now := metav1.Now()
			node.Status.Capacity, node.Status.Allocatable = capacity, capacity
			node.Status.Conditions = []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Fake",
				Message: "a node without a kubelet", LastHeartbeatTime: now, LastTransitionTime: now,
			}}
			_, err = nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{})
		} else if !tainted(node) {
			return nil
		} else {
			// kube-controller-manager takes it away too, a few seconds later.
			patch := fmt.Appendf(nil, `{"metadata":{"resourceVersion":%q},"spec":{"taints":null}}`, node.ResourceVersion)
			_, err = nodes.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
		}
		if err != nil && !apierrors.IsConflict(err) {
			return err
		}
	}
}

func ready(node *corev1.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue && len(node.Status.Allocatable) > 0
		}
	}
	return false
}

func tainted(node *corev1.Node) bool {
	for _, taint := range node.Spec.Taints {
		if taint.Key == notReadyTaint {
			return true
		}
	}
	return false
}

func remove(ctx context.Context, client kubernetes.Interface, prefix string) error {
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: fakeLabel + "=true"})
	if err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	var names []string
	for i := range list.Items {
		if strings.HasPrefix(list.Items[i].Name, prefix+"-") {
			names = append(names, list.Items[i].Name)
		}
	}
	err = parallel(len(names), func(i int) error {
		err := client.CoreV1().Nodes().Delete(ctx, names[i], metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("node %s: %w", names[i], err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "fake-nodes: %d nodes deleted\n", len(names))
	return nil
}

// parallel calls work for 0 to count-1 with a few workers and joins the errors.
func parallel(count int, work func(int) error) error {
	next := make(chan int)
	failures := make(chan error, count)
	var group sync.WaitGroup
	for range min(workers, count) {
		group.Go(func() {
			for i := range next {
				if err := work(i); err != nil {
					failures <- err
				}
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	group.Wait()
	close(failures)
	var all []error
	for err := range failures {
		all = append(all, err)
	}
	return errors.Join(all...)
}
