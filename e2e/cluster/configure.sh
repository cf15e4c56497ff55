# shellcheck shell=bash
# What `up` writes before anything starts: network, cgroups, configuration files,
# and one command file for each component. Sourced after lib.sh.

components=(etcd containerd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy)
SERVICE_IP=${SERVICE_CIDR%.*}.1
PAUSE_IMAGE=aliquot.local/pause:1

# Kernel settings that kubelet, kube-proxy and the CNI plugins change; `down`
# puts them back.
sysctls=(net/ipv4/ip_forward vm/overcommit_memory kernel/panic kernel/panic_on_oops
    net/ipv4/conf/all/route_localnet net/netfilter/nf_conntrack_max
    net/netfilter/nf_conntrack_tcp_timeout_established net/netfilter/nf_conntrack_tcp_timeout_close_wait)

save_sysctls() {
    local name
    for name in "${sysctls[@]}"; do
        [[ ! -r /proc/sys/$name ]] || echo "$name $(<"/proc/sys/$name")"
    done >"$CLUSTER_STATE/sysctls"
}

# Whether a directory is a mount point that passes its mounts on to no other
# mount namespace, as all are where no systemd runs.
is_private_mount() {
    local line peers
    # The fifth field is the mount point, those from the seventh to "-" its peer groups.
    while read -ra line; do
        [[ ${line[4]} == "$1" ]] || continue
        peers=" ${line[*]:6}"
        [[ ${peers%% - *} != *" shared:"* && ${peers%% - *} != *" master:"* ]]
        return
    done </proc/self/mountinfo
    return 1
}

# A volume with mount propagation can only be taken from a shared mount. `down`
# makes what was private so again.
share_mounts() {
    local point
    for point in / /dev /etc /home /opt /proc /run /sys /tmp /usr /var /var/lib; do
        if is_private_mount "$point" && mount --make-shared "$point"; then
            echo "$point" >>"$CLUSTER_STATE/private-mounts"
        fi
    done
}

configure_network() {
    # An address that exists on this machine only, for the node and the API
    # server: pods can reach it, which they could not a loopback address.
    ip address show dev lo | grep -qF " $NODE_IP/32 " || ip address add "$NODE_IP/32" dev lo
    # Without a default route the host could not even try a service's address,
    # which kube-proxy then translates.
    ip route get "$SERVICE_IP" >/dev/null 2>&1 || ip route add "$SERVICE_CIDR" dev lo src "$NODE_IP"
    # Pods are routed, not bridged: so kube-proxy sees every packet of theirs.
    cat >"$CLUSTER_STATE/cni/10-aliquot.conflist" <<END
{
  "cniVersion": "1.0.0",
  "name": "aliquot",
  "plugins": [
    {
      "type": "ptp",
      "ipMasq": false,
      "ipam": {
        "type": "host-local",
        "dataDir": "$CLUSTER_STATE/cni/addresses",
        "ranges": [[{ "subnet": "$POD_CIDR" }]],
        "routes": [{ "dst": "0.0.0.0/0" }]
      }
    }
  ]
}
END
}

# The mount points of every cgroup hierarchy in use: one with v2; one a
# controller, and maybe one for v2 beside them, with v1.
cgroup_mounts() {
    if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
        echo /sys/fs/cgroup
    else
        awk '$(NF-2) ~ /^cgroup2?$/ { print $5 }' /proc/self/mountinfo | sort -u
    fi
}

configure_cgroups() {
    local mount controller
    if [[ -e /sys/fs/cgroup/cgroup.controllers ]]; then
        for controller in $(</sys/fs/cgroup/cgroup.controllers); do
            echo "+$controller" >/sys/fs/cgroup/cgroup.subtree_control 2>/dev/null ||
                say "cgroup controller $controller cannot be switched on; going on without it"
        done
        mkdir -p "/sys/fs/cgroup/$POD_CGROUP"
        return
    fi
    for mount in $(cgroup_mounts); do
        mkdir -p "$mount/$POD_CGROUP"
        # v1's cpuset groups start without processors and refuse processes.
        if [[ -e $mount/cpuset.cpus ]]; then
            cat "$mount/cpuset.cpus" >"$mount/$POD_CGROUP/cpuset.cpus"
            cat "$mount/cpuset.mems" >"$mount/$POD_CGROUP/cpuset.mems"
        fi
    done
}

# Overlayfs where the state directory's file system can carry it.
snapshotter() {
    local try=$CLUSTER_STATE/overlay-try
    mkdir -p "$try"/{lower,upper,work,merged}
    if mount -t overlay overlay -o "lowerdir=$try/lower,upperdir=$try/upper,workdir=$try/work" "$try/merged" 2>/dev/null; then
        umount "$try/merged"
        echo overlayfs
    else
        say "no overlay file system on $CLUSTER_STATE: containers copy their images"
        echo native
    fi
    rm -rf "$try"
}

write_configs() {
    # Bit 24 is CAP_SYS_RESOURCE: without it no process may lower its OOM score,
    # and every container would fail to start.
    local caps restrict=false
    caps=$(sed -n 's/^CapEff:\s*//p' /proc/self/status)
    if ! ((0x$caps >> 24 & 1)); then
        restrict=true
    fi
    cat >"$CLUSTER_STATE/containerd.toml" <<END
version = 3
root = "$CLUSTER_STATE/containerd"
state = "$CLUSTER_RUN/containerd"
imports = []

[grpc]
address = "$CONTAINERD_SOCKET"

[ttrpc]
address = "$CONTAINERD_SOCKET.ttrpc"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "$(snapshotter)"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "$PAUSE_IMAGE"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = $restrict
netns_mounts_under_state_dir = true
cdi_spec_dirs = ["$CDI_DIR", "$CLUSTER_STATE/cdi"]
enable_selinux = false
disable_apparmor = true

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "$(command -v runc)"
Root = "$CLUSTER_RUN/runc"
SystemdCgroup = false

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["$cni_dir"]
conf_dir = "$CLUSTER_STATE/cni"
use_internal_loopback = true

[plugins."io.containerd.shim.v1.manager"]
socket_dir = "$CLUSTER_RUN/s"

[plugins."io.containerd.internal.v1.opt"]
path = "$CLUSTER_STATE/containerd/opt"

[plugins."io.containerd.nri.v1.nri"]
disable = true
END

    cat >"$CLUSTER_STATE/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $NODE_IP
authentication:
  anonymous: { enabled: false }
  webhook: { enabled: true }
  x509: { clientCAFile: $CLUSTER_STATE/keys/ca.crt }
authorization: { mode: Webhook }
tlsCertFile: $CLUSTER_STATE/keys/kubelet-serving.crt
tlsPrivateKeyFile: $CLUSTER_STATE/keys/kubelet-serving.key
cgroupDriver: cgroupfs
cgroupRoot: /$POD_CGROUP
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
makeIPTablesUtilChains: false
resolvConf: ""
containerRuntimeEndpoint: unix://$CONTAINERD_SOCKET
podLogsDir: $CLUSTER_STATE/logs/pods
volumePluginDir: $CLUSTER_STATE/volume-plugins
# A small disk is no reason to drop the images that no registry could give back.
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: { memory.available: 50Mi, nodefs.available: 0%, nodefs.inodesFree: 0%, imagefs.available: 0%, imagefs.inodesFree: 0% }
kubeAPIQPS: 200
kubeAPIBurst: 400
nodeStatusUpdateFrequency: 10s
syncFrequency: 10s
END

    cat >"$CLUSTER_STATE/proxy.yaml" <<END
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: $POD_CIDR
hostnameOverride: $NODE_NAME
clientConnection: { kubeconfig: $CLUSTER_STATE/keys/proxy.kubeconfig }
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
nodePortAddresses: [$NODE_IP/32]
conntrack: { maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s }
END
}

# write_command NAME WORDS...: one word a line in components/NAME.cmd.
write_command() {
    local name=$1 word
    shift
    {
        echo "# Started by up; stop and start it with: component restart $name"
        printf 'export PATH=%q\n' "$PATH"
        printf 'exec'
        for word in "$@"; do
            printf ' \\\n    %q' "$word"
        done
        echo
    } >"$CLUSTER_STATE/components/$name.cmd"
}

write_commands() {
    local keys=$CLUSTER_STATE/keys gates=() runtime=()
    if [[ -n ${FEATURE_GATES:-} ]]; then
        gates=("--feature-gates=$FEATURE_GATES")
    fi
    if [[ -n $(runtime_config) ]]; then
        runtime=("--runtime-config=$(runtime_config)")
    fi
    local apiserver_args controller_args scheduler_args kubelet_args
    read -ra apiserver_args <<<"${APISERVER_ARGS:-}"
    read -ra controller_args <<<"${CONTROLLER_MANAGER_ARGS:-}"
    read -ra scheduler_args <<<"${SCHEDULER_ARGS:-}"
    read -ra kubelet_args <<<"${KUBELET_ARGS:-}"

    write_command etcd "$bins/etcd" \
        --name=aliquot --data-dir="$CLUSTER_STATE/etcd" --unsafe-no-fsync --log-level=warn \
        --listen-client-urls="http://127.0.0.1:$ETCD_PORT" --advertise-client-urls="http://127.0.0.1:$ETCD_PORT" \
        --listen-peer-urls="http://127.0.0.1:$((ETCD_PORT + 1))" \
        --initial-advertise-peer-urls="http://127.0.0.1:$((ETCD_PORT + 1))" \
        --initial-cluster="aliquot=http://127.0.0.1:$((ETCD_PORT + 1))"

    write_command containerd "$bins/containerd" --config "$CLUSTER_STATE/containerd.toml"

    write_command kube-apiserver "$bins/kube-apiserver" \
        --etcd-servers="http://127.0.0.1:$ETCD_PORT" \
        --bind-address="$NODE_IP" --advertise-address="$NODE_IP" --secure-port="$API_PORT" \
        --tls-cert-file="$keys/apiserver.crt" --tls-private-key-file="$keys/apiserver.key" \
        --client-ca-file="$keys/ca.crt" \
        --kubelet-certificate-authority="$keys/ca.crt" \
        --kubelet-client-certificate="$keys/apiserver-kubelet-client.crt" \
        --kubelet-client-key="$keys/apiserver-kubelet-client.key" \
        --kubelet-preferred-address-types=InternalIP \
        --requestheader-client-ca-file="$keys/front-proxy-ca.crt" \
        --requestheader-allowed-names=front-proxy-client \
        --requestheader-username-headers=X-Remote-User \
        --requestheader-group-headers=X-Remote-Group \
        --requestheader-extra-headers-prefix=X-Remote-Extra- \
        --proxy-client-cert-file="$keys/front-proxy-client.crt" \
        --proxy-client-key-file="$keys/front-proxy-client.key" \
        --service-account-issuer=https://kubernetes.default.svc.cluster.local \
        --service-account-key-file="$keys/service-account.key" \
        --service-account-signing-key-file="$keys/service-account.key" \
        --service-cluster-ip-range="$SERVICE_CIDR" \
        --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction \
        --allow-privileged=true --enable-aggregator-routing=true \
        "${gates[@]}" "${runtime[@]}" "${apiserver_args[@]}"

    # Nodes are not declared dead for a day, so that fake ones (without a kubelet
    # that renews their leases) stay, and a stopped kubelet costs no pod.
    write_command kube-controller-manager "$bins/kube-controller-manager" \
        --kubeconfig="$keys/controller-manager.kubeconfig" \
        --authentication-kubeconfig="$keys/controller-manager.kubeconfig" \
        --authorization-kubeconfig="$keys/controller-manager.kubeconfig" \
        --bind-address=127.0.0.1 --leader-elect=false --use-service-account-credentials=true \
        --service-account-private-key-file="$keys/service-account.key" --root-ca-file="$keys/ca.crt" \
        --cluster-signing-cert-file="$keys/ca.crt" --cluster-signing-key-file="$keys/ca.key" \
        --node-monitor-grace-period="${NODE_MONITOR_GRACE:-24h}" \
        --flex-volume-plugin-dir="$CLUSTER_STATE/volume-plugins" \
        --kube-api-qps=500 --kube-api-burst=1000 \
        "${gates[@]}" "${controller_args[@]}"

    write_command kube-scheduler "$bins/kube-scheduler" \
        --kubeconfig="$keys/scheduler.kubeconfig" \
        --authentication-kubeconfig="$keys/scheduler.kubeconfig" \
        --authorization-kubeconfig="$keys/scheduler.kubeconfig" \
        --bind-address=127.0.0.1 --leader-elect=false \
        --kube-api-qps=500 --kube-api-burst=1000 \
        "${gates[@]}" "${scheduler_args[@]}"

    write_command kubelet "$bins/kubelet" \
        --config="$CLUSTER_STATE/kubelet.yaml" --kubeconfig="$keys/kubelet.kubeconfig" \
        --root-dir="$KUBELET_ROOT" --hostname-override="$NODE_NAME" --node-ip="$NODE_IP" \
        "${gates[@]}" "${kubelet_args[@]}"

    if [[ ${KUBE_PROXY:-1} == 1 ]]; then
        write_command kube-proxy "$bins/kube-proxy" --config="$CLUSTER_STATE/proxy.yaml" "${gates[@]}"
    fi
}

# cluster.env: what tests and people need to know, in shell syntax, one NAME='value'
# a line, so that other programs can read it too.
write_env() {
    local name value minor=${version#v}
    minor=${minor%.*}
    ln -sfn "$CLUSTER_STATE/keys/admin.kubeconfig" "$CLUSTER_STATE/kubeconfig"
    {
        while IFS='=' read -r name value; do
            printf "%s='%s'\n" "$name" "$value"
        done <<END
KUBECONFIG=$CLUSTER_STATE/kubeconfig
KUBERNETES_VERSION=$version
K8S_MINOR=$minor
CLUSTER_DIR=$cluster_dir
CLUSTER_STATE=$CLUSTER_STATE
CLUSTER_BIN=$bins
KUBECTL=$bins/kubectl
HELM=$bins/helm
CTR=$bins/ctr --address $CONTAINERD_SOCKET --namespace k8s.io
CONTAINERD_SOCKET=$CONTAINERD_SOCKET
SNAPSHOTTER=$(sed -n 's/^snapshotter = "\(.*\)"/\1/p' "$CLUSTER_STATE/containerd.toml")
APISERVER=https://$NODE_IP:$API_PORT
ETCD=http://127.0.0.1:$ETCD_PORT
NODE_NAME=$NODE_NAME
NODE_IP=$NODE_IP
KUBELET_ROOT=$KUBELET_ROOT
REGISTRAR_DIR=$KUBELET_ROOT/plugins_registry
PLUGIN_DIR=$KUBELET_ROOT/plugins
POD_RESOURCES_SOCKET=$KUBELET_ROOT/pod-resources/kubelet.sock
CDI_DIR=$CDI_DIR
CDI_DIR_STATE=$CLUSTER_STATE/cdi
LOG_DIR=$CLUSTER_STATE/logs
PAUSE_IMAGE=$PAUSE_IMAGE
TOOLS_IMAGE=aliquot.local/tools:1
END
    } >"$CLUSTER_STATE/cluster.env"
}
