//! Pins what a kubelet sees: the bytes of every message and the paths of every method. A field
//! number or a package that changes by mistake fails here and not on somebody's node.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use aliquot_proto::{dra, dra_health, pluginregistration, podresources, registered};
use http::{Request, Response};
use prost::Message;
use rstest::rstest;
use std::collections::HashMap;
use std::convert::Infallible;
use tonic::body::Body;
use tonic::{Status, async_trait};
use tower::{Service, ServiceExt};

/// Field `number` with wire type 2 (strings, messages), one length byte.
fn bytes_field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2, u8::try_from(content.len()).unwrap()];
    out.extend_from_slice(content);
    out
}

/// Field `number` with wire type 0 (integers, booleans, enums).
fn varint_field(number: u8, value: u8) -> Vec<u8> {
    assert!(value < 128);
    vec![number << 3, value]
}

/// The encoding is exactly these fields in this order, and decoding gives the message back.
fn assert_wire<M: Message + Default + PartialEq + std::fmt::Debug>(message: M, fields: &[Vec<u8>]) {
    let expected = fields.concat();
    assert_eq!(message.encode_to_vec(), expected);
    assert_eq!(M::decode(expected.as_slice()).unwrap(), message);
}

#[test]
fn registration_messages_have_the_kubelets_numbers() {
    use pluginregistration::v1::*;
    assert_wire(InfoRequest {}, &[]);
    assert_wire(
        PluginInfo {
            r#type: "t".into(),
            name: "n".into(),
            endpoint: "e".into(),
            supported_versions: vec!["a".into(), "b".into()],
        },
        &[
            bytes_field(1, b"t"),
            bytes_field(2, b"n"),
            bytes_field(3, b"e"),
            bytes_field(4, b"a"),
            bytes_field(4, b"b"),
        ],
    );
    assert_wire(
        RegistrationStatus { plugin_registered: true, error: "e".into() },
        &[varint_field(1, 1), bytes_field(2, b"e")],
    );
    assert_wire(RegistrationStatusResponse {}, &[]);
}

#[test]
fn dra_v1_messages_have_the_kubelets_numbers() {
    use dra::v1::*;
    let claim = || Claim { namespace: "ns".into(), uid: "u".into(), name: "n".into() };
    let claim_bytes = [bytes_field(1, b"ns"), bytes_field(2, b"u"), bytes_field(3, b"n")].concat();
    assert_wire(NodePrepareResourcesRequest { claims: vec![claim()] }, &[bytes_field(1, &claim_bytes)]);
    assert_wire(NodeUnprepareResourcesRequest { claims: vec![claim()] }, &[bytes_field(1, &claim_bytes)]);

    let device = Device {
        request_names: vec!["r".into(), "s".into()],
        pool_name: "p".into(),
        device_name: "d".into(),
        cdi_device_ids: vec!["v/c=d".into()],
        share_id: Some("i".into()),
    };
    let device_bytes = [
        bytes_field(1, b"r"),
        bytes_field(1, b"s"),
        bytes_field(2, b"p"),
        bytes_field(3, b"d"),
        bytes_field(4, b"v/c=d"),
        bytes_field(5, b"i"),
    ]
    .concat();
    let answer = NodePrepareResourceResponse { devices: vec![device], error: "e".into() };
    let answer_bytes = [bytes_field(1, &device_bytes), bytes_field(2, b"e")].concat();
    let entry = [bytes_field(1, b"u"), bytes_field(2, &answer_bytes)].concat();
    assert_wire(
        NodePrepareResourcesResponse { claims: HashMap::from([("u".into(), answer)]) },
        &[bytes_field(1, &entry)],
    );

    let entry = [bytes_field(1, b"u"), bytes_field(2, &bytes_field(1, b"e"))].concat();
    assert_wire(
        NodeUnprepareResourcesResponse {
            claims: HashMap::from([("u".into(), NodeUnprepareResourceResponse { error: "e".into() })]),
        },
        &[bytes_field(1, &entry)],
    );
}

#[test]
fn an_absent_share_id_is_not_on_the_wire_and_an_empty_one_is() {
    let device = |share_id: Option<&str>| dra::v1::Device {
        share_id: share_id.map(str::to_owned),
        ..dra::v1::Device::default()
    };
    assert_wire(device(None), &[]);
    assert_wire(device(Some("")), &[bytes_field(5, b"")]);
}

#[test]
fn dra_v1beta1_is_v1_without_the_share() {
    let v1 = dra::v1::NodePrepareResourceResponse {
        devices: vec![dra::v1::Device {
            request_names: vec!["r".into()],
            pool_name: "p".into(),
            device_name: "d".into(),
            cdi_device_ids: vec!["v/c=d".into()],
            share_id: None,
        }],
        error: String::new(),
    };
    let beta = dra::v1beta1::NodePrepareResourceResponse {
        devices: vec![dra::v1beta1::Device {
            request_names: vec!["r".into()],
            pool_name: "p".into(),
            device_name: "d".into(),
            cdi_device_ids: vec!["v/c=d".into()],
        }],
        error: String::new(),
    };
    assert_eq!(v1.encode_to_vec(), beta.encode_to_vec());
    let claim = dra::v1::Claim { namespace: "a".into(), uid: "b".into(), name: "c".into() };
    assert_eq!(
        dra::v1beta1::Claim::decode(claim.encode_to_vec().as_slice()).unwrap(),
        dra::v1beta1::Claim { namespace: "a".into(), uid: "b".into(), name: "c".into() }
    );
}

#[test]
fn health_messages_have_the_kubelets_numbers_in_both_versions() {
    let expected = bytes_field(
        1,
        &[
            bytes_field(1, &[bytes_field(1, b"p"), bytes_field(2, b"d")].concat()),
            varint_field(2, 2),
            varint_field(3, 7),
            varint_field(4, 30),
            bytes_field(5, b"m"),
        ]
        .concat(),
    );
    macro_rules! check {
        ($version:ident) => {{
            use dra_health::$version::*;
            assert_wire(
                NodeWatchResourcesResponse {
                    devices: vec![DeviceHealth {
                        device: Some(DeviceIdentifier { pool_name: "p".into(), device_name: "d".into() }),
                        health: HealthStatus::Unhealthy.into(),
                        last_updated_time: 7,
                        health_check_timeout_seconds: 30,
                        message: "m".into(),
                    }],
                },
                std::slice::from_ref(&expected),
            );
            assert_eq!((HealthStatus::Unknown as i32, HealthStatus::Healthy as i32), (0, 1));
        }};
    }
    check!(v1);
    check!(v1alpha1);
}

#[test]
fn pod_resources_messages_have_the_kubelets_numbers() {
    use podresources::v1::*;
    let topology = || Some(TopologyInfo { nodes: vec![NumaNode { id: 1 }] });
    let topology_bytes = bytes_field(1, &varint_field(1, 1));
    let memory = ContainerMemory { memory_type: "m".into(), size: 9, topology: topology() };
    let memory_bytes = [bytes_field(1, b"m"), varint_field(2, 9), bytes_field(3, &topology_bytes)].concat();
    let devices = ContainerDevices {
        resource_name: "r".into(),
        device_ids: vec!["0".into(), "1".into()],
        topology: topology(),
    };
    let devices_bytes =
        [bytes_field(1, b"r"), bytes_field(2, b"0"), bytes_field(2, b"1"), bytes_field(3, &topology_bytes)]
            .concat();
    let dynamic = DynamicResource {
        claim_name: "c".into(),
        claim_namespace: "ns".into(),
        claim_resources: vec![ClaimResource {
            cdi_devices: vec![CdiDevice { name: "v/c=d".into() }],
            driver_name: "d".into(),
            pool_name: "p".into(),
            device_name: "g".into(),
            share_id: Some("s".into()),
        }],
    };
    let dynamic_bytes = [
        bytes_field(2, b"c"),
        bytes_field(3, b"ns"),
        bytes_field(
            4,
            &[
                bytes_field(1, &bytes_field(1, b"v/c=d")),
                bytes_field(2, b"d"),
                bytes_field(3, b"p"),
                bytes_field(4, b"g"),
                bytes_field(5, b"s"),
            ]
            .concat(),
        ),
    ]
    .concat();
    let container = ContainerResources {
        name: "c".into(),
        devices: vec![devices.clone()],
        cpu_ids: vec![3],
        memory: vec![memory.clone()],
        dynamic_resources: vec![dynamic],
    };
    // Repeated integers are packed: one length-delimited field.
    let container_bytes = [
        bytes_field(1, b"c"),
        bytes_field(2, &devices_bytes),
        bytes_field(3, &[3]),
        bytes_field(4, &memory_bytes),
        bytes_field(5, &dynamic_bytes),
    ]
    .concat();
    let pod = PodResources {
        name: "p".into(),
        namespace: "ns".into(),
        containers: vec![container],
        cpu_ids: vec![4],
        memory: vec![memory.clone()],
    };
    // Longer than one length byte can say: compare piece by piece.
    let encoded = pod.encode_to_vec();
    assert!(encoded.starts_with(&[bytes_field(1, b"p"), bytes_field(2, b"ns"), vec![3 << 3 | 2]].concat()));
    assert!(
        encoded.ends_with(&[container_bytes, bytes_field(4, &[4]), bytes_field(5, &memory_bytes)].concat())
    );
    assert_eq!(PodResources::decode(encoded.as_slice()).unwrap(), pod);

    let small = || PodResources { name: "p".into(), ..PodResources::default() };
    let small_bytes = bytes_field(1, &bytes_field(1, b"p"));
    assert_wire(ListPodResourcesRequest {}, &[]);
    assert_wire(
        ListPodResourcesResponse { pod_resources: vec![small()] },
        std::slice::from_ref(&small_bytes),
    );
    assert_wire(
        GetPodResourcesRequest { pod_name: "p".into(), pod_namespace: "ns".into() },
        &[bytes_field(1, b"p"), bytes_field(2, b"ns")],
    );
    assert_wire(GetPodResourcesResponse { pod_resources: Some(small()) }, &[small_bytes]);
    assert_wire(AllocatableResourcesRequest {}, &[]);
    assert_wire(
        AllocatableResourcesResponse { devices: vec![devices], cpu_ids: vec![3], memory: vec![memory] },
        &[bytes_field(1, &devices_bytes), bytes_field(2, &[3]), bytes_field(3, &memory_bytes)],
    );
}

/// Answers everything with an empty message, for the tests of the paths.
struct Empty;

type Reply<T> = Result<tonic::Response<T>, Status>;

#[async_trait]
impl pluginregistration::v1::registration_server::Registration for Empty {
    async fn get_info(
        &self,
        _: tonic::Request<pluginregistration::v1::InfoRequest>,
    ) -> Reply<pluginregistration::v1::PluginInfo> {
        Ok(tonic::Response::new(Default::default()))
    }
    async fn notify_registration_status(
        &self,
        _: tonic::Request<pluginregistration::v1::RegistrationStatus>,
    ) -> Reply<pluginregistration::v1::RegistrationStatusResponse> {
        Ok(tonic::Response::new(Default::default()))
    }
}

macro_rules! empty_versions {
    (dra: $($dra:ident)*; health: $($health:ident)*) => {
        $(#[async_trait]
        impl dra::$dra::dra_plugin_server::DraPlugin for Empty {
            async fn node_prepare_resources(
                &self,
                _: tonic::Request<dra::$dra::NodePrepareResourcesRequest>,
            ) -> Reply<dra::$dra::NodePrepareResourcesResponse> {
                Ok(tonic::Response::new(Default::default()))
            }
            async fn node_unprepare_resources(
                &self,
                _: tonic::Request<dra::$dra::NodeUnprepareResourcesRequest>,
            ) -> Reply<dra::$dra::NodeUnprepareResourcesResponse> {
                Ok(tonic::Response::new(Default::default()))
            }
        })*
        $(#[async_trait]
        impl dra_health::$health::dra_resource_health_server::DraResourceHealth for Empty {
            type NodeWatchResourcesStream =
                tokio_stream::Empty<Result<dra_health::$health::NodeWatchResourcesResponse, Status>>;
            async fn node_watch_resources(
                &self,
                _: tonic::Request<dra_health::$health::NodeWatchResourcesRequest>,
            ) -> Reply<Self::NodeWatchResourcesStream> {
                Ok(tonic::Response::new(tokio_stream::empty()))
            }
        })*
    };
}
empty_versions!(dra: v1 v1beta1; health: v1 v1alpha1);

#[async_trait]
impl podresources::v1::pod_resources_lister_server::PodResourcesLister for Empty {
    async fn list(
        &self,
        _: tonic::Request<podresources::v1::ListPodResourcesRequest>,
    ) -> Reply<podresources::v1::ListPodResourcesResponse> {
        Ok(tonic::Response::new(Default::default()))
    }
    async fn get_allocatable_resources(
        &self,
        _: tonic::Request<podresources::v1::AllocatableResourcesRequest>,
    ) -> Reply<podresources::v1::AllocatableResourcesResponse> {
        Ok(tonic::Response::new(Default::default()))
    }
    async fn get(
        &self,
        _: tonic::Request<podresources::v1::GetPodResourcesRequest>,
    ) -> Reply<podresources::v1::GetPodResourcesResponse> {
        Ok(tonic::Response::new(Default::default()))
    }
}

/// Sends an empty message to `path` and says whether the service has a method there.
async fn knows<S>(service: S, path: &str) -> bool
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    // A gRPC frame: not compressed, no bytes.
    let frame = Body::empty();
    let request = Request::post(path)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(frame)
        .unwrap();
    let response = service.oneshot(request).await.unwrap();
    response.headers().get("grpc-status").is_none_or(|status| status != "12")
}

#[rstest]
#[case::registration_info("/pluginregistration.Registration/GetInfo")]
#[case::registration_status("/pluginregistration.Registration/NotifyRegistrationStatus")]
#[case::dra_v1_prepare("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources")]
#[case::dra_v1_unprepare("/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources")]
#[case::dra_v1beta1_prepare("/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources")]
#[case::dra_v1beta1_unprepare("/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources")]
#[case::health_v1("/v1.DRAResourceHealth/NodeWatchResources")]
#[case::health_v1alpha1("/v1alpha1.DRAResourceHealth/NodeWatchResources")]
#[case::pods_list("/v1.PodResourcesLister/List")]
#[case::pods_allocatable("/v1.PodResourcesLister/GetAllocatableResources")]
#[case::pods_get("/v1.PodResourcesLister/Get")]
#[tokio::test]
async fn every_method_answers_on_the_kubelets_path(#[case] path: &str) {
    let name = path.split('/').nth(1).unwrap();
    macro_rules! answers {
        ($($server:path),*) => {{
            let mut found = 0;
            $(if <$server as tonic::server::NamedService>::NAME == name {
                assert!(knows(<$server>::new(Empty), path).await, "{path} is not implemented");
                assert!(!knows(<$server>::new(Empty), &format!("{path}2")).await);
                found += 1;
            })*
            assert_eq!(found, 1, "servers named {name}");
        }};
    }
    answers!(
        pluginregistration::v1::registration_server::RegistrationServer<Empty>,
        dra::v1::dra_plugin_server::DraPluginServer<Empty>,
        dra::v1beta1::dra_plugin_server::DraPluginServer<Empty>,
        dra_health::v1::dra_resource_health_server::DraResourceHealthServer<Empty>,
        dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer<Empty>,
        podresources::v1::pod_resources_lister_server::PodResourcesListerServer<Empty>
    );
}

#[test]
fn the_newest_version_is_offered_first() {
    assert_eq!(
        registered::ALL,
        ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]
    );
}
