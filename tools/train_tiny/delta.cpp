// The gated delta rule, token by token, and its gradients. KEY and VALUE, the sizes of a head, are
// given when this is compiled, so that the inner loops have fixed lengths.
#include <torch/extension.h>

#include <vector>

namespace {

using torch::Tensor;

struct Sizes {
  int64_t batch, tokens, heads;
};

// Advances state [KEY][VALUE] by a token, and stores in `change` the row that it adds at `k`.
inline void advance(float* state, const float* k, const float* v, float decay, float beta,
                    float* change) {
  float seen[VALUE] = {};
  for (int i = 0; i < KEY; ++i)
    for (int j = 0; j < VALUE; ++j) {
      state[i * VALUE + j] *= decay;
      seen[j] += state[i * VALUE + j] * k[i];
    }
  for (int j = 0; j < VALUE; ++j) change[j] = beta * (v[j] - seen[j]);
  for (int i = 0; i < KEY; ++i)
    for (int j = 0; j < VALUE; ++j) state[i * VALUE + j] += k[i] * change[j];
}

Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
               const Tensor& beta) {
  const Sizes n{q.size(0), q.size(1), q.size(2)};
  Tensor out = torch::empty_like(v);
  const float *qs = q.data_ptr<float>(), *ks = k.data_ptr<float>(), *vs = v.data_ptr<float>();
  const float *decays = decay.data_ptr<float>(), *betas = beta.data_ptr<float>();
  float* outs = out.data_ptr<float>();
  at::parallel_for(0, n.batch * n.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t sequence = begin; sequence < end; ++sequence) {
      const int64_t first = sequence / n.heads * n.tokens * n.heads + sequence % n.heads;
      float state[KEY * VALUE] = {}, change[VALUE];
      for (int64_t t = 0; t < n.tokens; ++t) {
        const int64_t at = first + t * n.heads;
        advance(state, ks + at * KEY, vs + at * VALUE, decays[at], betas[at], change);
        float o[VALUE] = {};
        for (int i = 0; i < KEY; ++i)
          for (int j = 0; j < VALUE; ++j) o[j] += state[i * VALUE + j] * qs[at * KEY + i];
        std::copy(o, o + VALUE, outs + at * VALUE);
      }
    }
  });
  return out;
}

std::vector<Tensor> backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& decay, const Tensor& beta) {
  const Sizes n{q.size(0), q.size(1), q.size(2)};
  Tensor dq = torch::empty_like(q), dk = torch::empty_like(k), dv = torch::empty_like(v);
  Tensor ddecay = torch::empty_like(decay), dbeta = torch::empty_like(beta);
  const float *qs = q.data_ptr<float>(), *ks = k.data_ptr<float>(), *vs = v.data_ptr<float>();
  const float *decays = decay.data_ptr<float>(), *betas = beta.data_ptr<float>();
  const float* grads = grad.data_ptr<float>();
  float *dqs = dq.data_ptr<float>(), *dks = dk.data_ptr<float>(), *dvs = dv.data_ptr<float>();
  float *ddecays = ddecay.data_ptr<float>(), *dbetas = dbeta.data_ptr<float>();
  constexpr int SIZE = KEY * VALUE;
  at::parallel_for(0, n.batch * n.heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> states((n.tokens + 1) * SIZE), changes(n.tokens * VALUE);
    for (int64_t sequence = begin; sequence < end; ++sequence) {
      const int64_t first = sequence / n.heads * n.tokens * n.heads + sequence % n.heads;
      std::fill_n(states.data(), SIZE, 0.0f);
      for (int64_t t = 0; t < n.tokens; ++t) {
        const int64_t at = first + t * n.heads;
        float* state = states.data() + (t + 1) * SIZE;
        std::copy(state - SIZE, state, state);
        advance(state, ks + at * KEY, vs + at * VALUE, decays[at], betas[at],
                changes.data() + t * VALUE);
      }
      float ds[SIZE] = {};  // the gradient of the state after token t
      for (int64_t t = n.tokens - 1; t >= 0; --t) {
        const int64_t at = first + t * n.heads;
        const float *before = states.data() + t * SIZE, *after = before + SIZE;
        const float *o = grads + at * VALUE, *change = changes.data() + t * VALUE;
        const float *key = ks + at * KEY, *query = qs + at * KEY;
        float dchange[VALUE] = {}, seen[VALUE] = {};
        for (int i = 0; i < KEY; ++i) {
          float a = 0, b = 0;
          for (int j = 0; j < VALUE; ++j) {
            ds[i * VALUE + j] += query[i] * o[j];
            a += after[i * VALUE + j] * o[j];
            b += ds[i * VALUE + j] * change[j];
            dchange[j] += ds[i * VALUE + j] * key[i];
            seen[j] += before[i * VALUE + j] * key[i];
          }
          dqs[at * KEY + i] = a;
          dks[at * KEY + i] = b;
        }
        float db = 0, dseen[VALUE];
        for (int j = 0; j < VALUE; ++j) {
          db += dchange[j] * (vs[at * VALUE + j] - decays[at] * seen[j]);
          dseen[j] = -betas[at] * dchange[j];
          dvs[at * VALUE + j] = -dseen[j];
        }
        dbetas[at] = db;
        float total = 0;
        for (int i = 0; i < KEY; ++i) {
          float a = 0;
          for (int j = 0; j < VALUE; ++j) {
            a += before[i * VALUE + j] * dseen[j];
            ds[i * VALUE + j] += key[i] * dseen[j];
            total += ds[i * VALUE + j] * before[i * VALUE + j];
            ds[i * VALUE + j] *= decays[at];
          }
          dks[at * KEY + i] += decays[at] * a;
        }
        ddecays[at] = total;
      }
    }
  });
  return {dq, dk, dv, ddecay, dbeta};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("forward", &forward);
  module.def("backward", &backward);
}
