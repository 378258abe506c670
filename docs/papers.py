r"""What the pages of the methods show beside the docstrings: the update in the paper's symbols, and the preprint.

A method without an entry has a page all the same, with the formulas of its docstring. Symbols: i a client, N their
number, S those that responded, w_i (or p_i, where w is a model) shares of the training examples, θ what is averaged,
f_i the client's loss.
"""

#: The equations of a method's page in LaTeX, by the strategy's class.
EQUATIONS: dict[str, list[str]] = {
    "AdaFGL": [
        r"\tilde A = \operatorname{norm}\big(\alpha A + (1-\alpha) R\big), \qquad "
        r"R_{uv} = \mathbb 1[\cos(\hat P_u, \hat P_v) > \text{threshold}]",
        r"Y = h\, Y_{\mathrm{ho}} + (1 - h)\, Y_{\mathrm{he}}",
    ],
    "APFL": [
        r"w_i \leftarrow w_i - \eta \nabla f_i(w_i), \qquad "
        r"v_i \leftarrow v_i - \eta\, \alpha_i \nabla f_i(\bar v_i), \qquad \bar v_i = \alpha_i v_i + "
        r"(1-\alpha_i) w_i",
        r"\alpha_i \leftarrow \operatorname{clip}\big(\alpha_i - \eta_\alpha "
        r"\langle v_i - w_i, \nabla f_i(\bar v_i)\rangle,\, 0,\, 1\big)",
    ],
    "DFedAvgM": [
        r"y \leftarrow y - \eta \nabla f_i(y) + \rho\,(y - y^{\mathrm{before}}) \quad K \text{ times}, \qquad "
        r"\theta_i \leftarrow \sum_j W_{ij}\, y_j"
    ],
    "DFedU": [
        r"\theta_i \leftarrow \theta_i - \alpha \Big(\nabla f_i(\theta_i) + \lambda \sum_j a_{ij} (\theta_i "
        r"- \theta_j)\Big)"
    ],
    "Ditto": [
        r"u \leftarrow u - \eta \nabla f_i(u), \qquad "
        r"v_i \leftarrow v_i - \eta \big(\nabla f_i(v_i) + \lambda (v_i - \theta)\big)"
    ],
    "DPSGD": [r"\theta_i \leftarrow \sum_j W_{ij} \big(\theta_j - \eta \nabla f_j(\theta_j)\big)"],
    "FedAMP": [
        r"u_i = \sum_j \xi_{ij} \theta_j, \qquad \xi_{ij} = \frac{\kappa}{N-1} e^{-d_{ij}/\sigma} \ (j \ne i), "
        r"\qquad \theta_i \approx \arg\min_x f_i(x) + \tfrac{\mu}{2} \|x - u_i\|^2"
    ],
    "FedAux": [
        r"z_v = \frac{\sum_u \kappa(s_v, s_u)\, h_u}{\sum_u \kappa(s_v, s_u)}, \qquad \kappa(s, t) = e^{-(s - t)^2 / "
        r"\sigma^2}, \qquad s_v = \cos(h_v, a_i) \qquad \text{(eq. 6)}",
        r"W_{ij} = \frac{\exp(\tau \cos(a_i, a_j))}{\sum_k \exp(\tau \cos(a_i, a_k))}, \qquad "
        r"\theta_i \leftarrow \sum_j W_{ij}\, \theta_j \qquad \text{(eqs. 7, 8)}",
    ],
    "FedAvg": [r"\theta \leftarrow \sum_{i \in S} w_i\, \theta_i"],
    "FedAvgFinetune": [
        r"\theta \leftarrow \sum_{i \in S} w_i\, \theta_i, \qquad "
        r"\theta_i = \theta - \eta \nabla f_i(\theta) - \dots \ \text{ before client } i \text{ is evaluated}"
    ],
    "FedBABU": [
        r"\varphi \leftarrow \sum_{i \in S} w_i\, \varphi_i \ \text{ with one random head } h \text{ that "
        r"nobody trains}, "
        r"\qquad (\varphi_i, h_i) \text{ fine-tuned at the end}"
    ],
    "FedBN": [
        r"\theta^{\ell} \leftarrow \sum_{i \in S} w_i\, \theta_i^{\ell} \ \text{ for every layer } \ell "
        r"\text{ but the normalizations, which stay with their client}"
    ],
    "FedDyn": [
        r"\theta_i \approx \arg\min_x f_i(x) - \langle \hat g_i, x \rangle + \tfrac{\alpha}{2} \|x - "
        r"\theta\|^2, \qquad "
        r"\hat g_i \leftarrow \hat g_i - \alpha (\theta_i - \theta)",
        r"h \leftarrow h - \tfrac{\alpha}{N} \sum_{i \in S} (\theta_i - \theta), \qquad "
        r"\theta \leftarrow \tfrac{1}{|S|} \sum_{i \in S} \theta_i - \tfrac{1}{\alpha} h",
    ],
    "FedGCN": [
        r"s_v = \sum_k \sum_{u \text{ of } k,\ \tilde A_{vu} = 1} \frac{x_u}{\sqrt{d_u + 1}}, \qquad "
        r"(\hat A X)_v = \frac{s_v}{\sqrt{d_v + 1}}, \qquad \theta \leftarrow \sum_i w_i\, \theta_i"
    ],
    "FedGNN": [
        r"H^{(2)} = \big((1-\beta)\, \hat A H^{(1)} + \beta\, \bar e\big) W + b, \qquad "
        r"\beta_v = \frac{m_v}{m_v + d_v + 1}"
    ],
    "FedGTA": [
        r"\theta_i \leftarrow \frac{\sum_{j \in A_i} H_j\, \theta_j}{\sum_{j \in A_i} H_j}, \qquad "
        r"A_i = \{j : \cos(m_i, m_j) > \epsilon\} \cup \{i\}"
    ],
    "FedIIH": [
        r"W^{(k)}_{ij} \propto \exp\!\Big(\tau \big(1 - \tfrac{1}{\ln 2} \mathrm{JS}^{(k)}_{ij}\big)\Big), \qquad "
        r"\theta_i^{(k)} \leftarrow \sum_j W^{(k)}_{ij}\, \theta_j^{(k)} \quad \text{for each factor } k"
    ],
    "FedOpt": [
        r"\Delta = \sum_{i \in S} w_i (\theta_i - \theta), \qquad m \leftarrow \beta_1 m + (1-\beta_1) "
        r"\Delta, \qquad "
        r"v \leftarrow \beta_2 v + (1-\beta_2) \Delta^2 \ \text{(Adam)}",
        r"\theta \leftarrow \theta + \eta\, \frac{m}{\sqrt v + \tau}",
    ],
    "FedPer": [r"\varphi \leftarrow \sum_{i \in S} w_i\, \varphi_i, \qquad h_i \text{ stays with client } i"],
    "FedProto": [
        r"\min f_i + \lambda \frac{1}{|B|} \sum_{v \in B} \frac{1}{d} \|z_v - \bar C_{y_v}\|^2, \qquad "
        r"\bar C_k \leftarrow \frac{\sum_i n_{i,k}\, C_{i,k}}{\sum_i n_{i,k}}"
    ],
    "FedProx": [
        r"\theta_i \approx \arg\min_x f_i(x) + \tfrac{\mu}{2} \|x - \theta\|^2, \qquad "
        r"\theta \leftarrow \sum_{i \in S} w_i\, \theta_i"
    ],
    "FedPub": [
        r"S_{ij} = \cos\big(\tilde h_i, \tilde h_j\big), \qquad "
        r"\theta_i \leftarrow \sum_j \frac{e^{\tau S_{ij}}}{\sum_k e^{\tau S_{ik}}}\, \theta_j, \qquad "
        r"\text{client } i \text{ trains } \mu_i \odot \theta_i"
    ],
    "FedRep": [
        r"h_i \leftarrow h_i - \eta \nabla_h f_i(\varphi, h_i), \qquad "
        r"\varphi_i \leftarrow \varphi_i - \eta \nabla_\varphi f_i(\varphi_i, h_i), \qquad "
        r"\varphi \leftarrow \sum_i w_i\, \varphi_i"
    ],
    "FedSage": [
        r"h_v \leftarrow \sigma\Big(W \big[h_v \,\big\|\, \operatorname{mean}_{u \in \mathcal N(v)} "
        r"h_u\big]\Big), \qquad "
        r"\theta \leftarrow \sum_{i \in S} w_i\, \theta_i"
    ],
    "FedSagePlus": [
        r"L_A = a\, \operatorname{smooth}_{L_1}(\tilde n, n) + b\, L_{\mathrm{feat}} + c\, "
        r"L_{\mathrm{class}}, \qquad "
        r"L_{\mathrm{feat}} = \frac{1}{|T| S} \sum_{v \in T} \sum_{p \le [\tilde n_v]} "
        r"\min_k \tfrac{1}{F} \|\tilde x_{v,p} - x_{v,k}\|^2"
    ],
    "FedSheafHN": [
        r"L_{\mathcal F}(X)_n = \sum_{n, m \trianglelefteq e} \mathcal F_{n \trianglelefteq e}^{\top} "
        r"(\mathcal F_{n \trianglelefteq e}\, x_n - \mathcal F_{m \trianglelefteq e}\, x_m), \qquad "
        r"\Delta_{\mathcal F} = D^{-1/2} L_{\mathcal F} D^{-1/2} \qquad \text{(eqs. 5, 6)}",
        r"X_t = X_{t-1} - \sigma\big(\Delta_{\mathcal F} (I \otimes W_1) X_{t-1} W_2\big) \qquad \text{(eqs. 7, 8)}",
        r"\omega_i = \mathcal H\big(\operatorname{softmax}\big((X A^Q)(X A^K)^{\top}\big) X A^V\big)_i "
        r"\qquad \text{(eqs. 10, 11)}, \qquad "
        r"\Delta\varphi = (\nabla_\varphi\, \omega)^{\top} \Delta\omega \qquad \text{(eqs. 12–15)}",
    ],
    "FedSpray": [
        r"\mathrm{CE}_T(g) + \lambda \operatorname{mean}_{\mathrm{Rel}} \mathrm{KL}\big(p \,\|\, "
        r"\operatorname{softmax} g\big), "
        r"\qquad S_k \leftarrow \frac{\sum_i r_{ik} S_{ik}}{\sum_i r_{ik}}"
    ],
    "FedSSP": [
        r"\mathrm{CE}\big(\operatorname{head}(r + c_i)\big) + \tfrac{\tau}{2} \operatorname{mean}\, (\mu - "
        r"\bar\mu)^2, \qquad "
        r"\bar\mu \leftarrow \operatorname{mean}_i \mu_i"
    ],
    "FedStar": [
        r"s \leftarrow \tanh(\mathrm{GCN}(s)), \qquad x \leftarrow \mathrm{ReLU}\big(\mathrm{GIN}([x \,\|\, "
        r"s])\big), \qquad "
        r"\theta_s \leftarrow \sum_i w_i\, \theta_{s,i}"
    ],
    "FedStruct": [
        r"t_v = [s_v, (\hat A s)_v, \dots, (\hat A^L s)_v], \qquad "
        r"\text{logits} = (\tilde D_i^{-1} \tilde A_i)^{L'} \operatorname{MLP}(X) + W t"
    ],
    "FedTAD": [
        r"\kappa_{ic} = \frac{R_{ic}}{\sum_j R_{jc}}, \qquad D(f) = \sum_{i,c} \kappa_{ic} "
        r"\operatorname{mean}_{j \in c} |f(x_j) - f_i(x_j)|, \qquad \theta \text{ minimizes } D, \ G \text{ "
        r"maximizes it}"
    ],
    "FGGP": [
        r"P_k = \frac{\sum_{\hat y_v = k} c_v f_v}{\sum_{\hat y_v = k} c_v}, \qquad "
        r"L = \mathrm{CE} + \mathrm{CE}_2 + L_{\mathrm{pa}} + \omega\, \mathrm{BCE}(S, A_2)"
    ],
    "FGSSL": [
        r"f + \lambda_s L_{\mathrm{sem}} + \lambda_t L_{\mathrm{str}}, \qquad "
        r"L_{\mathrm{sem}} = -\operatorname{mean}_{v} \operatorname{mean}_{u:\, y_u = y_v} "
        r"\ln \frac{e^{\cos(a_v, b_u)/\tau}}{\sum_{u'} e^{\cos(a_v, b_{u'})/\tau}}"
    ],
    "Flow": [
        r"h^{l+1}(x) = q_l(x)\, w^l(h^l) + (1 - q_l(x))\, \ell^l(h^l), \qquad "
        r"w \leftarrow \sum_i w_i\, w^{(i)}, \qquad \psi \leftarrow \sum_i w_i\, \psi^{(i)}"
    ],
    "GCFL": [
        r"\big\|\operatorname{mean}_i \Delta_i\big\| < \epsilon_1 \ \text{ and } \ \max_i \|\Delta_i\| > \epsilon_2 "
        r"\;\Rightarrow\; I \text{ is parted by the minimum cut of } \cos(\Delta_i, \Delta_j) + 1",
        r"\theta_I \leftarrow \frac{\sum_{i \in I} n_i \theta_i}{\sum_{i \in I} n_i}",
    ],
    "GCFLPlus": [
        r"\text{as GCFL, with weights } \max D - D_{ij}, \qquad "
        r"D_{ij} = \mathrm{DTW}\big((\|\Delta_i\|)_t, (\|\Delta_j\|)_t\big) \ \text{ over the last rounds}"
    ],
    "Kin": [r"W_{ij} = (1 - s)\, \operatorname{softmax}_j\big(\tau S_{ij} + \log n_j\big) + s\, w_j"],
    "Local": [r"\theta_i \leftarrow \theta_i - \eta \nabla f_i(\theta_i)"],
    "LocalAux": [
        r"W_{ij} = (1 - s) \frac{\exp(\tau \cos(a_i, a_j))}{\sum_k \exp(\tau \cos(a_i, a_k))} + s\, w_j, \qquad "
        r"\theta_i \leftarrow \sum_j W_{ij}\, \theta_j, \qquad a_i \text{ stays with client } i"
    ],
    "MOON": [
        r"f_i - \mu \log \frac{e^{\cos(z, z_g)/T}}{e^{\cos(z, z_g)/T} + e^{\cos(z, z_p)/T}}, \qquad "
        r"\theta \leftarrow \sum_{i \in S} w_i\, \theta_i"
    ],
    "Panacea": [
        r"\min_{\psi}\ \mathcal L_{\mathcal{GH}} + \lambda_d \mathcal L_d \qquad \text{(eq. 3)}, \qquad "
        r"\mathcal L_{\mathcal{GH}} = \tfrac{1}{2 |\mathcal T|} \sum_t \big\|\theta_t - \mathcal{GH}(h_t, A; "
        r"\psi)\big\|^2 \qquad \text{(eq. 4)}",
        r"\mathcal L_d = \mathbb E_{u,v} \big[-A_{uv} \log \sigma(\hat z_u^{\top} \hat z_v) - (1 - A_{uv}) \log (1 - "
        r"\sigma(\hat z_u^{\top} \hat z_v))\big] \qquad \text{(eq. 5)}",
    ],
    "PerFedAvg": [
        r"\min_w \frac1N \sum_i f_i\big(w - \alpha \nabla f_i(w)\big), \qquad "
        r"y = x - \alpha \nabla f_i(x; D), \quad x \leftarrow x - \beta\, \nabla f_i(y; D') \ \text{(first order)}"
    ],
    "PFedGraph": [
        r"W_i = \arg\min_{w \in \Delta} \sum_j w_j d_{ij} + \alpha \sum_j (w_j - p_j)^2, \qquad "
        r"\theta_i \approx \arg\min_x f_i(x) - \lambda \sum_j W_{ij} \cos(x, \theta_j)"
    ],
    "PFedHN": [
        r"\theta_i = \mathcal H(e_i; \varphi), \qquad \Delta\varphi = (\nabla_\varphi\, \theta_i)^{\top} "
        r"\Delta\theta_i, "
        r"\qquad \Delta e_i = (\nabla_{e_i}\, \theta_i)^{\top} \Delta\theta_i"
    ],
    "PFedMe": [
        r"x_i \leftarrow x_i - \eta_p \big(\nabla f_i(x_i) + \lambda (x_i - w_i)\big), \qquad "
        r"w_i \leftarrow w_i + \eta \lambda (x_i - w_i), \qquad w \leftarrow (1-\beta) w + \beta \sum_{i \in S} p_i w_i"
    ],
    "S2FGL": [
        r"\mathrm{CE} + \lambda_s \operatorname{mean}_v \mathrm{KL}\big(p(f'_v) \,\|\, p(f_v)\big) + "
        r"\lambda_f \sum_{\mathrm{low,\,high}} \operatorname{mean}\, (P Z - P' Z')^2"
    ],
    "SCAFFOLD": [
        r"y \leftarrow y - \eta \big(g_i(y) + c - c_i\big), \qquad c_i \leftarrow \frac{1}{\tau_i} \sum_k g_i(y_k)",
        r"\theta \leftarrow \theta + \frac{\eta_g}{|S|} \sum_{i \in S} (y_i - \theta), \qquad c = \frac1N \sum_i c_i",
    ],
    "SFL": [
        r"v_i \approx \arg\min_x f_i(x) + \tfrac{\lambda}{2} \|x - w\|^2 + \tfrac{\lambda}{2} \|x - u_i\|^2, \qquad "
        r"u_i \leftarrow \rho\, (\hat A^L V)_i + (1-\rho)\, v_i, \qquad w \leftarrow \frac1N \sum_i u_i"
    ],
    "SheafFMTL": [
        r"\theta_i \leftarrow \theta_i - \alpha \Big(\nabla f_i(\theta_i) + \lambda \sum_j P_{ij}^{\top} "
        r"(P_{ij}\theta_i - P_{ji}\theta_j)\Big) \qquad \text{(eq. 18)}",
        r"P_{ij} \leftarrow P_{ij} - \eta \lambda\, (P_{ij}\theta_i - P_{ji}\theta_j)\, \theta_i^{\top} \ "
        r"\text{ with the new } \theta "
        r"\qquad \text{(eq. 19)}",
    ],
    "SheafRidge": [r"\theta_i = m + s \sum_j K_{ij} (\tilde\theta_j - m), \qquad K = G (G + \lambda I)^{-1}"],
    "TwinScaffold": [
        r"p(y \mid x) = (1 - s_i) \operatorname{softmax} f_\theta(x) + s_i \operatorname{softmax} f_{v_i}(x)"
    ],
}

#: The preprints, by the strategy's class.
ARXIV: dict[str, str] = {
    "AdaFGL": "2401.11750",
    "APFL": "2003.13461",
    "DFedAvgM": "2104.11375",
    "Ditto": "2012.04221",
    "DPSGD": "1705.09056",
    "FedAMP": "2007.03797",
    "FedAvg": "1602.05629",
    "FedBABU": "2106.06042",
    "FedBN": "2102.07623",
    "FedDyn": "2111.04263",
    "FedGNN": "2102.04925",
    "FedStruct": "2402.19163",
    "FedOpt": "2003.00295",
    "FedPer": "1912.00818",
    "FedProto": "2105.00243",
    "FedProx": "1812.06127",
    "FedPub": "2206.10206",
    "FedRep": "2102.07078",
    "FedSage": "2106.13430",
    "FedSagePlus": "2106.13430",
    "FedSheafHN": "2405.13056",
    "FedStar": "2211.13009",
    "FedTAD": "2404.14061",
    "GCFL": "2106.13423",
    "GCFLPlus": "2106.13423",
    "MOON": "2103.16257",
    "PerFedAvg": "2002.07948",
    "PFedHN": "2103.04628",
    "PFedMe": "2006.08848",
    "SCAFFOLD": "1910.06378",
}

#: Where papers without a preprint can be read.
ELSEWHERE: dict[str, str] = {"SheafFMTL": "https://openreview.net/forum?id=JlPq0LmApB"}
