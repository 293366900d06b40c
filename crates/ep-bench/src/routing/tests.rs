use std::fs;

use proptest::prelude::*;

use super::*;
use crate::case::{Dtype, Layout, Operation, Shape};

pub(crate) fn case(routing: Routing, shape: Shape) -> Case {
    Case {
        operation: Operation::Dispatch,
        workload: "custom".into(),
        shape,
        dtype: Dtype::Bf16,
        layout: Layout::RankMajor,
        alignment: 1,
        routing,
        seed: 1,
        cached: false,
        unequal: false,
    }
}

fn shape(ranks: usize, tokens: usize, topk: usize, experts: usize) -> Shape {
    Shape { ranks, tokens, hidden: 64, topk, experts }
}

fn routes(routing: Routing, shape: Shape, rank: usize) -> Routes {
    Router::new(&case(routing, shape)).unwrap().routes(rank)
}

fn loads(routes: &Routes, experts: usize) -> Vec<usize> {
    let mut loads = vec![0; experts];
    routes.ids.iter().filter(|&&id| id >= 0).for_each(|&id| loads[id as usize] += 1);
    loads
}

#[test]
fn uniform_loads_experts_evenly() {
    let routes = routes(Routing::Uniform, shape(4, 8192, 8, 64), 0);
    // 1024 expected, standard deviation below 32.
    assert!(loads(&routes, 64).iter().all(|n| (850..1200).contains(n)));
}

#[test]
fn zipf_follows_its_exponent_and_is_the_same_on_all_ranks() {
    let shape = shape(2, 20_000, 1, 16);
    let router = Router::new(&case(Routing::Zipf(1.0), shape)).unwrap();
    let order = |rank| {
        let loads = loads(&router.routes(rank), 16);
        let mut by_load: Vec<usize> = (0..16).collect();
        by_load.sort_by_key(|&e| std::cmp::Reverse(loads[e]));
        (by_load, loads)
    };
    let ((first, loads), (second, _)) = (order(0), order(1));
    assert_eq!(first[..3], second[..3]);
    let ratio = loads[first[0]] as f64 / loads[first[1]] as f64;
    assert!((1.85..2.15).contains(&ratio), "{ratio}");
    let flat = routes(Routing::Zipf(0.0), shape, 0);
    assert!(super::tests::loads(&flat, 16).iter().all(|n| (1100..1400).contains(n)));
}

#[test]
fn grouped_uses_four_groups_and_ranks_them_by_their_two_best() {
    let routes = routes(Routing::Grouped, shape(8, 500, 8, 256), 3);
    for token in routes.ids.chunks(8) {
        let mut groups: Vec<i64> = token.iter().map(|id| id / 32).collect();
        groups.sort_unstable();
        groups.dedup();
        assert!(groups.len() <= GROUPS_KEPT);
    }
    let mut scores = [0.1; 16];
    // One excellent expert loses against two good ones.
    scores[0] = 0.9;
    for group in [2, 3, 5, 7] {
        scores[2 * group] = 0.6;
        scores[2 * group + 1] = 0.6;
    }
    let mut kept = generate::best_groups(&scores);
    kept.sort_unstable();
    assert_eq!(kept, [2, 3, 5, 7]);
}

#[test]
fn masked_drops_its_share() {
    let routes = routes(Routing::Masked(0.3), shape(2, 10_000, 8, 64), 1);
    let dropped = routes.ids.iter().filter(|&&id| id == -1).count();
    assert!((22_800..25_200).contains(&dropped), "{dropped}");
    for (id, w) in routes.ids.iter().zip(&routes.weights) {
        assert_eq!(*id == -1, *w == 0.0);
    }
}

#[test]
fn one_rank_gets_everything() {
    let shape = shape(3, 50, 6, 8);
    let routes = routes(Routing::OneRank(1), shape, 0);
    for token in routes.ids.chunks(6) {
        let mut real: Vec<i64> = token.iter().copied().filter(|&id| id >= 0).collect();
        real.sort_unstable();
        assert_eq!(real, [3, 4, 5], "rank 1 of 3 holds experts 3 to 5 of 8");
    }
}

#[test]
fn unequal_ranks_differ_and_stay_in_range() {
    let mut case = case(Routing::Uniform, shape(32, 100, 2, 64));
    case.unequal = true;
    let router = Router::new(&case).unwrap();
    let tokens: Vec<usize> = (0..32).map(|rank| router.tokens(rank)).collect();
    assert!(tokens.iter().all(|&n| n <= 100));
    assert!(tokens.iter().max() != tokens.iter().min());
    assert_eq!(router.routes(5).ids.len(), tokens[5] * 2);
}

#[test]
fn options_parse_and_print() {
    for (text, routing) in [
        ("uniform", Routing::Uniform),
        ("zipf", Routing::Zipf(1.0)),
        ("zipf:1.2", Routing::Zipf(1.2)),
        ("grouped", Routing::Grouped),
        ("masked:0.3", Routing::Masked(0.3)),
        ("one-rank", Routing::OneRank(0)),
        ("one-rank:3", Routing::OneRank(3)),
        ("a.npy", Routing::File("a.npy".into(), None)),
        ("d/a.safetensors#l.0", Routing::File("d/a.safetensors".into(), Some("l.0".into()))),
    ] {
        assert_eq!(text.parse::<Routing>().as_ref(), Ok(&routing));
        assert_eq!(routing.to_string().parse::<Routing>(), Ok(routing));
    }
    for bad in ["", "unifrom", "masked", "masked:2", "zipf:x", "one-rank:-1", "grouped:1", "a.txt"]
    {
        assert!(bad.parse::<Routing>().is_err(), "{bad}");
    }
}

#[test]
fn sizes_that_do_not_fit_are_errors() {
    for (routing, shape) in [
        (Routing::Uniform, shape(0, 1, 1, 1)),
        (Routing::Uniform, shape(4, 1, 1, 3)),
        (Routing::Uniform, shape(1, 1, 5, 4)),
        (Routing::Uniform, shape(1, 1, 0, 4)),
        (Routing::Grouped, shape(1, 1, 4, 12)),
        (Routing::Grouped, shape(1, 1, 9, 16)),
        (Routing::OneRank(2), shape(2, 1, 1, 4)),
    ] {
        let error = Router::new(&case(routing, shape)).unwrap_err();
        assert!(matches!(error, BenchError::Usage(_)), "{error}");
    }
}

proptest! {
    #[test]
    fn ids_are_distinct_and_weights_sum_to_one(
        kind in 0usize..5, ranks in 1usize..6, more in 0usize..20, topk in 1usize..9,
        rank in 0usize..5, seed: u64,
    ) {
        let experts = (ranks + more).max(topk);
        let routing = match kind {
            0 => Routing::Uniform,
            1 => Routing::Zipf(1.3),
            2 => Routing::Masked(0.5),
            3 => Routing::OneRank(ranks - 1),
            _ => Routing::Grouped,
        };
        let experts = if kind == 4 { experts.div_ceil(16) * 16 } else { experts };
        let mut case = case(routing, shape(ranks, 7, topk, experts));
        case.seed = seed;
        let routes = Router::new(&case).unwrap().routes(rank % ranks);
        prop_assert_eq!(&routes, &Router::new(&case).unwrap().routes(rank % ranks));
        for (ids, weights) in routes.ids.chunks(topk).zip(routes.weights.chunks(topk)) {
            let mut real: Vec<i64> = ids.iter().copied().filter(|&id| id != -1).collect();
            prop_assert!(real.iter().all(|&id| (0..experts as i64).contains(&id)));
            real.sort_unstable();
            real.dedup();
            prop_assert_eq!(real.len(), ids.iter().filter(|&&id| id != -1).count());
            let sum: f32 = weights.iter().sum();
            prop_assert!(real.is_empty() || (sum - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn garbage_files_are_errors(bytes in prop::collection::vec(any::<u8>(), 0..200), magic: bool) {
        let dir = scratch("garbage");
        let mut data = if magic { b"\x93NUMPY\x01\x00".to_vec() } else { Vec::new() };
        data.extend(bytes);
        for name in ["g.npy", "g.safetensors"] {
            fs::write(dir.join(name), &data).unwrap();
            prop_assert!(read(&dir.join(name), None, 2, 8).is_err());
        }
    }
}

fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("ep-bench-{name}-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    dir
}

fn read(
    path: &std::path::Path,
    tensor: Option<&str>,
    topk: usize,
    experts: usize,
) -> Result<Replay> {
    Replay::read(path, tensor, &shape(1, 4, topk, experts))
}

fn npy(descr: &str, fortran: bool, dims: &str, data: &[u8]) -> Vec<u8> {
    let order = if fortran { "True" } else { "False" };
    let mut head = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {dims}, }}");
    while !(head.len() + 11).is_multiple_of(64) {
        head.push(' ');
    }
    head.push('\n');
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((head.len() as u16).to_le_bytes());
    file.extend(head.bytes());
    file.extend(data);
    file
}

fn i32s(ids: &[i32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

#[test]
fn npy_files_are_read() {
    let path = scratch("npy").join("ids.npy");
    let ids = [0, 1, 2, 3, -1, 5];
    let i64s: Vec<u8> = ids.iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
    let big: Vec<u8> = ids.iter().flat_map(|id: &i32| id.to_be_bytes()).collect();
    for file in [
        npy("<i4", false, "(3, 2)", &i32s(&ids)),
        npy("<u4", false, "(3, 2)", &i32s(&ids)),
        npy("<i8", false, "(3, 2)", &i64s),
        npy(">i4", false, "(3, 2)", &big),
        npy("<i4", true, "(3, 2)", &i32s(&[0, 2, -1, 1, 3, 5])),
    ] {
        fs::write(&path, file).unwrap();
        let replay = read(&path, None, 2, 8).unwrap();
        assert_eq!(replay.ids(0, 3), ids.map(i64::from));
        assert_eq!(replay.ids(2, 2), [-1, 5, 0, 1], "starts over at the end");
        assert_eq!(Replay::columns(&path, None).unwrap(), 2);
    }
    let routing = Routing::File(path, None);
    let routes = routes(routing, shape(2, 2, 2, 8), 1);
    assert_eq!(routes.ids, [-1, 5, 0, 1], "rank 1 goes on where rank 0 ended");
}

#[test]
fn malformed_npy_files_are_errors() {
    let path = scratch("bad-npy").join("ids.npy");
    for (file, says) in [
        (b"PK".to_vec(), "not a .npy file"),
        (npy("<i4", false, "(3,)", &i32s(&[0, 1, 2])), "expected [tokens, topk]"),
        (npy("<i4", false, "(1, 1, 2)", &i32s(&[0, 1])), "expected [tokens, topk]"),
        (npy("<f4", false, "(1, 2)", &i32s(&[0, 1])), "expected int32"),
        (npy("<i2", false, "(1, 4)", &i32s(&[0, 1, 2, 3])), "expected int32"),
        (npy("<i8", false, "(5, 2)", &i32s(&[0; 10])), "does not fit 40 bytes"),
        (npy("<i4", false, "(4000000000, 2)", &i32s(&[0, 1])), "does not fit 8 bytes"),
        (npy("[('a', '<i4')]", false, "(1, 2)", &i32s(&[0, 1])), "cannot understand"),
        (npy("<i4", false, "(1, 3)", &i32s(&[0, 1, 2])), "--topk is 2"),
        (npy("<i4", false, "(0, 2)", &[]), "no routes"),
        (npy("<i4", false, "(1, 2)", &i32s(&[0, 8])), "token 0, entry 1: id 8 is out of range"),
        (npy("<i4", false, "(1, 2)", &i32s(&[-2, 3])), "less than -1"),
        (npy("<i4", false, "(2, 2)", &i32s(&[0, 1, 3, 3])), "token 1 names expert 3 twice"),
    ] {
        fs::write(&path, file).unwrap();
        let error = read(&path, None, 2, 8).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("ids.npy"), "{says}: {error}");
    }
    let missing = read(std::path::Path::new("/nonexistent.npy"), None, 2, 8).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent.npy"), "{missing}");
    let error = read(&path, Some("x"), 2, 8).unwrap_err().to_string();
    assert!(error.contains("leave out"), "{error}");
}

#[test]
fn safetensors_files_are_read_and_checked() {
    use safetensors::{Dtype, serialize, tensor::TensorView};
    let path = scratch("st").join("ids.safetensors");
    let (ids, other) = (i32s(&[0, 1, 2, 3, -1, 5]), i32s(&[0; 6]));
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let save = |tensors: Vec<(&str, TensorView)>| {
        fs::write(&path, serialize(tensors, None).unwrap()).unwrap();
    };
    let a = || ("a", view(Dtype::I32, &[3, 2], &ids));
    save(vec![a(), ("w", view(Dtype::F32, &[3, 2], &other))]);
    assert_eq!(read(&path, None, 2, 8).unwrap().ids(0, 3), [0, 1, 2, 3, -1, 5]);
    assert_eq!(read(&path, Some("a"), 2, 8).unwrap().tokens(), 3);
    let says = |tensor: Option<&str>, what: &str| {
        let error = read(&path, tensor, 2, 8).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    };
    says(Some("w"), "expected I32");
    says(Some("z"), "has no tensor `z`; it has");
    save(vec![a(), ("b", view(Dtype::I32, &[3, 2], &other))]);
    says(None, "`a`, `b`; choose one");
    says(Some("b"), "twice");
    save(vec![("a", view(Dtype::I32, &[6], &ids))]);
    says(None, "no [tokens, topk] tensor");
    says(Some("a"), "expected [tokens, topk]");
    let mut cut = fs::read(&path).unwrap();
    cut.truncate(cut.len() - 1);
    fs::write(&path, cut).unwrap();
    says(None, "not a .safetensors file");
}

#[test]
fn contiguous_owners() {
    let owners: Vec<usize> = (0..8).map(|e| owner(e, 8, 3)).collect();
    assert_eq!(owners, [0, 0, 0, 1, 1, 1, 2, 2]);
}
