# shellcheck shell=bash
# What the cluster scripts share: settings, messages, paths. Sourced, never run.

set -euo pipefail

cluster_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo_dir=$(cd "$cluster_dir/../.." && pwd)
cache_dir=$repo_dir/.cache/cluster

K8S_MINOR=${K8S_MINOR:-1.37}
K8S_MINOR=${K8S_MINOR#v}

# Everything that can be long lives in the state directory; unix sockets, whose
# paths are limited to 107 bytes, live in the run and kubelet directories.
CLUSTER_STATE=${CLUSTER_STATE:-$cache_dir/run}
CLUSTER_RUN=/run/aliquot-cluster
KUBELET_ROOT=${KUBELET_ROOT:-/var/lib/kubelet}
CDI_DIR=/var/run/cdi

NODE_NAME=aliquot-node
NODE_IP=10.111.0.1
POD_CIDR=10.112.0.0/24
SERVICE_CIDR=10.96.0.0/16
API_PORT=${API_PORT:-16443}
ETCD_PORT=12379
CONTAINERD_SOCKET=$CLUSTER_RUN/containerd.sock
# The cgroup that all pods live under, so that what a crash leaves can be found.
POD_CGROUP=${POD_CGROUP:-aliquot-cluster}
# In the environment of every process that we start; shims inherit it.
MARK=ALIQUOT_CLUSTER_MARK=$CLUSTER_RUN

say() { printf 'cluster: %s\n' "$*" >&2; }
fail() {
    printf 'cluster: error: %s\n' "$*" >&2
    exit 1
}

# Seconds since the script began, with tenths.
elapsed() {
    local now=${EPOCHREALTIME/[.,]/} from=${started_at/[.,]/}
    printf '%d.%01ds' $(((now - from) / 1000000)) $(((now - from) / 100000 % 10))
}
started_at=$EPOCHREALTIME

# One cluster a machine: its addresses, cgroup and run directory are fixed.
lock_cluster() {
    exec 9>/run/aliquot-cluster.lock
    flock -w 600 9 || fail "another up or down of the cluster has held /run/aliquot-cluster.lock for 600 s"
}

# 0 when the machine can run the cluster at all; else says why, and 1.
can_run() {
    if [[ $(uname -s) != Linux ]]; then
        say "cannot run here: needs Linux, this is $(uname -s)"
        return 1
    fi
    if [[ $(id -u) != 0 ]]; then
        say "cannot run here: needs root (containers, mounts and cgroups), this is uid $(id -u)"
        return 1
    fi
    # Bit 21 is CAP_SYS_ADMIN, bit 12 CAP_NET_ADMIN.
    local caps
    caps=$(sed -n 's/^CapEff:\s*//p' /proc/self/status)
    if ! ((0x$caps >> 21 & 1)) || ! ((0x$caps >> 12 & 1)); then
        say "cannot run here: needs CAP_SYS_ADMIN and CAP_NET_ADMIN, the effective capabilities are $caps"
        return 1
    fi
}

# The version of Kubernetes that a minor stands for, from its module file.
kubernetes_version() {
    local file=$cluster_dir/kube/v$1.mod
    if [[ ! -e $file ]]; then
        fail "Kubernetes $1 is not set up here; there is $(minors); add one with e2e/cluster/kube/new-minor v$1.PATCH"
    fi
    sed -n 's/^require k8s.io\/kubernetes //p; s/^\tk8s.io\/kubernetes v/v/p' "$file" | head -n 1
}

minors() {
    local each list=()
    for each in "$cluster_dir"/kube/v*.mod; do
        each=${each##*/v}
        list+=("${each%.mod}")
    done
    echo "${list[*]}"
}

# The directory of ready programs for the chosen minor.
bin_dir() {
    if [[ -n ${ALIQUOT_CLUSTER_BIN:-} ]]; then
        (cd "$ALIQUOT_CLUSTER_BIN" && pwd)
    else
        echo "$cache_dir/bin/$(kubernetes_version "$K8S_MINOR")"
    fi
}

programs=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl
    etcd containerd containerd-shim-runc-v2 ctr helm oci-image fake-nodes keys pause smoke-agent)
# program -> Debian package, for what is not built here
declare -A packages=([runc]=runc [nft]=nftables [ip]=iproute2 [busybox]=busybox-static
    [mount]=mount [flock]=util-linux)
cni_dir=${CNI_DIR:-/usr/lib/cni}

# What the API server serves beyond its defaults: what RUNTIME_CONFIG says, and the
# API that kube-scheduler waits for with device taints, which is alpha up to 1.35.
runtime_config() {
    local config=${RUNTIME_CONFIG:-} api=resource.k8s.io/v1alpha3 minor=${version#v1.}
    minor=${minor%%.*}
    if [[ ,${FEATURE_GATES:-}, == *,DRADeviceTaints=true,* && ,$config != *,$api=* ]] && ((minor < 36)); then
        config+=${config:+,}$api=true
    fi
    echo "$config"
}

# --- processes -------------------------------------------------------------

# A component's process id, when it runs.
component_pid() {
    local pid
    pid=$(cat "$CLUSTER_STATE/components/$1.pid" 2>/dev/null) || return 1
    [[ -n $pid ]] && marked "$pid" || return 1
    echo "$pid"
}

# Whether a process is one that we started: a process id alone may be reused.
marked() {
    [[ -r /proc/$1/environ ]] && tr '\0' '\n' 2>/dev/null <"/proc/$1/environ" | grep -qxF "$MARK"
}

# start_component NAME: runs what components/NAME.cmd says, in the background.
start_component() {
    local dir=$CLUSTER_STATE/components
    if component_pid "$1" >/dev/null; then
        return 0
    fi
    env "$MARK" setsid bash "$dir/$1.cmd" </dev/null >>"$CLUSTER_STATE/logs/$1.log" 2>&1 9>&- &
    echo $! >"$dir/$1.pid"
}

# stop_component NAME [SIGNAL]: asks it to end, insists after 10 seconds.
stop_component() {
    local pid tries=0
    pid=$(component_pid "$1") || return 0
    kill "-${2:-TERM}" "$pid" 2>/dev/null || true
    while marked "$pid"; do
        ((tries++ < 100)) || kill -KILL "$pid" 2>/dev/null || true
        ((tries < 300)) || fail "$1 (process $pid) does not end"
        sleep 0.1
    done
    rm -f "$CLUSTER_STATE/components/$1.pid"
}

# wait_for WHAT SECONDS COMPONENT COMMAND...: until the command succeeds; gives up
# at once, with the end of its log, when the component that it asks is gone.
wait_for() {
    local what=$1 limit=$2 component=$3 from=$SECONDS said=$SECONDS
    shift 3
    until "$@" >/dev/null 2>&1; do
        if ! component_pid "$component" >/dev/null; then
            show_log "$component"
            fail "$component ended; waited for: $what"
        fi
        if ((SECONDS - from >= limit)); then
            show_log "$component"
            fail "$what: not after $limit s"
        fi
        if ((SECONDS - said >= 15)); then
            said=$SECONDS
            say "still waiting for $what ($((SECONDS - from)) of $limit s)"
        fi
        sleep 0.2
    done
    say "$what ($(elapsed))"
}

# probe SERVER PATH: an HTTP GET, with the certificate of the administrator.
probe() {
    "$CLUSTER_STATE/kubectl" --kubeconfig "$CLUSTER_STATE/keys/admin.kubeconfig" --request-timeout=5s \
        --server "$1" --insecure-skip-tls-verify get --raw "$2"
}

# Whether a component answers that it is well.
healthy() {
    case $1 in
    etcd) probe "http://127.0.0.1:$ETCD_PORT" /readyz ;;
    containerd) "$CLUSTER_STATE/ctr" --address "$CONTAINERD_SOCKET" version ;;
    kube-apiserver) probe "https://$NODE_IP:$(<"$CLUSTER_STATE/api-port")" /readyz ;;
    kube-controller-manager) probe https://127.0.0.1:10257 /healthz ;;
    kube-scheduler) probe https://127.0.0.1:10259 /readyz ;;
    kubelet) probe http://127.0.0.1:10248 /healthz ;;
    kube-proxy) probe http://127.0.0.1:10256 /livez ;;
    esac
}

show_log() {
    local log=$CLUSTER_STATE/logs/$1.log
    say "the end of $log:"
    tail -n "${2:-15}" "$log" | cut -c -400 | sed 's/^/    /' >&2 || true
}
